"""A token of probability 0 has the smallest logprob that can be sent, on every engine."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from serving.engine import MIN_LOGPROB, Generation, TokenLogprob, reported_logprob
from serving.engines.torch_engine.sampling import logprobs

ASKED = Generation(prompt=(1,), max_tokens=1, num_logprobs=2)
WANTED = [TokenLogprob(token_id=1, logprob=-9999.0, top=((0, 0.0), (1, -9999.0)))]


def test_of_the_torch_engine() -> None:
    assert logprobs([1], [2], torch.tensor([[5.0, -math.inf]])) == WANTED


def test_logprobs_that_are_no_numbers_are_reported_as_the_smallest() -> None:
    assert reported_logprob(math.nan) == MIN_LOGPROB
    [found] = logprobs([1], [1], torch.tensor([[math.nan, 1.0]]))
    assert (found.logprob, found.top[0][1]) == (MIN_LOGPROB, MIN_LOGPROB)


@pytest.mark.vllm
def test_of_vllm() -> None:
    pytest.importorskip("vllm", reason="make test-vllm has it", exc_type=ModuleNotFoundError)
    from serving.engines.vllm_engine import _step_of

    found = {1: SimpleNamespace(logprob=-math.inf), 0: SimpleNamespace(logprob=0.0)}
    completion: Any = SimpleNamespace(
        finish_reason=None, weight_versions=None, token_ids=[1], logprobs=[found]
    )
    output: Any = SimpleNamespace(
        outputs=[completion], prompt_logprobs=None, num_cached_tokens=None
    )
    step = _step_of(output, ASKED, "r")
    assert list(step.logprobs) == WANTED
