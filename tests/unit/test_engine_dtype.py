"""Which type of number an engine computes in, where the settings leave it to the release."""

from pathlib import Path

import pytest
import torch

from pipeline.retrain.export import make_probe
from serving.swap import measure_probe
from serving.weights.release import Probe, choose_dtype, is_fast_in_bfloat16
from tests.torch_engine_fixtures import build, engine_with, llama_config, prompt, publish

FAST = "bfloat16" if is_fast_in_bfloat16("cpu") else "float32"
"""What a release in bfloat16 is computed in on this machine."""


def probe(*dtypes: str) -> Probe:
    return Probe(dtype="float32", texts=(), bounds=dict.fromkeys(dtypes, 0.1))


@pytest.mark.parametrize(
    ("stored", "bounds", "expected"),
    [
        (torch.bfloat16, ("float32", "bfloat16"), FAST),
        (torch.bfloat16, ("float32",), "float32"),
        (torch.bfloat16, None, FAST),
        (torch.float16, ("float32", "float16"), "float32"),  # no CPU is fast in it
        (torch.float32, ("float32", "bfloat16"), "float32"),
    ],
)
def test_auto_is_the_stored_dtype_where_the_hardware_and_the_probe_allow_it(
    tmp_path: Path, stored: torch.dtype, bounds: tuple[str, ...] | None, expected: str
) -> None:
    told = None if bounds is None else probe(*bounds)
    release = publish(build(llama_config(), 1, stored), tmp_path, probe=told).release
    assert release.stored_dtype == str(stored).removeprefix("torch.")
    assert choose_dtype("auto", "cpu", release) == expected
    assert choose_dtype("bfloat16", "cpu", release) == "bfloat16", "a person decides"


def test_a_torch_without_the_private_function_computes_in_float32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(torch.cpu, "_is_avx512_bf16_supported")
    assert not is_fast_in_bfloat16("cpu")


async def test_a_release_in_bfloat16_is_within_the_bound_of_its_probe(tmp_path: Path) -> None:
    network = build(llama_config(), 1, torch.bfloat16)
    exact = build(llama_config(), 1).float()
    exact.load_state_dict(network.state_dict())
    found = make_probe(exact, [prompt(20, 1), prompt(12, 2)])
    published = publish(network, tmp_path, probe=found)
    async with engine_with(published) as engine:
        bound = found.bounds[engine.dtype_of(published.release)]
        assert await measure_probe(engine, published.id, found, bound) == []
        assert await measure_probe(engine, published.id, found, 0.0) != []
