"""What vLLM can take as other weights of the network that it runs."""

import json
from pathlib import Path

import pytest

from serving.engines.same_network import config_differences, tensor_differences
from serving.weights.release import Release, TensorEntry


def release(**tensors: tuple[str, tuple[int, ...]]) -> Release:
    return Release(
        id="r000001-00000000",
        pipeline="answers",
        created_at="2026-01-01T00:00:00+00:00",
        files={},
        tensors={
            name: TensorEntry(
                file="a.safetensors", dtype=dtype, shape=shape, digest="blake3:" + "0" * 64
            )
            for name, (dtype, shape) in tensors.items()
        },
    )


def test_every_difference_of_tensors_is_named() -> None:
    running = release(a=("F32", (2, 3)), b=("F32", (2,)), c=("F32", (2,)), d=("I32", (2,)))
    wanted = release(a=("F32", (3, 2)), b=("I64", (2,)), e=("F32", (2,)), d=("I32", (2,)))
    assert tensor_differences(running, wanted) == [
        "a.safetensors: tensor a: float [3, 2], vLLM runs float [2, 3]",
        "a.safetensors: tensor b: I64 [2], vLLM runs float [2]",
        "release.json: tensor c: missing, vLLM runs float [2]",
        "a.safetensors: tensor e: float [2], vLLM runs no such tensor",
    ]


@pytest.mark.parametrize(
    ("before", "after", "fits"),
    [
        ("F32", "BF16", True),
        ("BF16", "F64", True),
        ("F8_E4M3", "F8_E4M3", True),
        ("F8_E4M3", "BF16", False),
        ("U8", "I8", False),
    ],
)
def test_plain_numbers_are_rounded_and_others_are_not(before: str, after: str, fits: bool) -> None:
    found = tensor_differences(release(a=(before, (2,))), release(a=(after, (2,))))
    assert (found == []) == fits


def test_a_config_may_differ_in_what_is_not_the_network(tmp_path: Path) -> None:
    configs = {
        "running": {"rope_theta": 1e4, "eos_token_id": 1, "hidden_act": "silu"},
        "wanted": {"rope_theta": 5e5, "eos_token_id": 2, "quantization_config": {"bits": 4}},
    }
    for name, config in configs.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    assert config_differences(tmp_path / "running", tmp_path / "wanted") == [
        "config.json: hidden_act is None, vLLM runs 'silu'",
        "config.json: quantization_config is {'bits': 4}, vLLM runs None",
        "config.json: rope_theta is 500000.0, vLLM runs 10000.0",
    ]
