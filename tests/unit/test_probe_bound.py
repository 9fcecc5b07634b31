"""What a server in float32 may be off by grows with how sure the network is."""

from typing import Any

import pytest

from pipeline.retrain.export import FLOAT32_BOUNDS, float32_bound, make_probe
from tests.torch_engine_fixtures import build, llama_config, prompt


@pytest.mark.parametrize(
    ("logprobs", "bound"),
    [
        ([], 2e-3),
        ([(-0.5, -9.0), (-3.0,)], 2e-3),
        ([(-0.5, -37.0), (-3.0,)], 37 * 2e-4),
        ([(-0.5, -80.0), (-3.0,)], 8e-3),
    ],
    ids=["none", "usual", "sure", "too sure"],
)
def test_bound(logprobs: list[tuple[float, ...]], bound: float) -> None:
    assert float32_bound(logprobs) == pytest.approx(bound)


def test_the_probe_of_a_sure_network_has_it() -> None:
    network: Any = build(llama_config())
    head = network.get_output_embeddings().weight.data
    head.mul_(0.1)
    assert make_probe(network, [prompt(12)]).bounds["float32"] == FLOAT32_BOUNDS[0]
    head.mul_(20)
    probe = make_probe(network, [prompt(12)])
    assert probe.bounds["float32"] == float32_bound([probe.texts[0].logprobs]) > FLOAT32_BOUNDS[0]
