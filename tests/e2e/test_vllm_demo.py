"""`pipeline demo --engine vllm`: the same story, with vLLM to answer."""

import re

import pytest

from tests.stack_fixtures import Workplace, workplace

pytest.importorskip("vllm", reason="make test-vllm has it", exc_type=ModuleNotFoundError)

__all__ = ["workplace"]

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1000)]


def test_the_demo_runs_on_vllm(workplace: Workplace) -> None:
    shown = workplace.run("demo", "--engine", "vllm", timeout=900)
    assert (shown.count("✓"), shown.count("✗")) == (16, 0)
    requests = re.search(
        r"(\d+) requests were .* 0 failed; answered: (\d+) by r\S+, (\d+) by r", shown
    )
    assert requests is not None, shown
    sent, before, after = map(int, requests.groups())
    assert sent == before + after
    steps = [shown.index(step) for step in ("push answered", "train done", "first new answer")]
    assert steps == sorted(steps)
