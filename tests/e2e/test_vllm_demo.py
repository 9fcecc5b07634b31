"""`pipeline demo --engine vllm`: the same story, with vLLM to answer."""

import json

import pytest

from tests.stack_fixtures import Workplace, workplace

pytest.importorskip("vllm", reason="make test-vllm has it", exc_type=ModuleNotFoundError)

__all__ = ["workplace"]

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1000)]


def test_the_demo_runs_on_vllm(workplace: Workplace) -> None:
    report = json.loads(workplace.run("demo", "--engine", "vllm", "--json", timeout=900))
    assert report["ok"]
    assert report["requests"]["failed"] == 0
    assert report["requests"]["sent"] == sum(report["requests"]["by_release"].values())
    assert len(report["requests"]["by_release"]) == 2
    newest, oldest = report["releases"]
    assert newest["served"] and newest["parent"] == oldest["id"]
    for answer in report["answers"]:
        assert answer["before"]["release"] == oldest["id"]
        assert answer["after"]["release"] == newest["id"]
    second = report["seconds"]["second"]
    assert list(second) == sorted(second, key=second.__getitem__)
    assert second["push answered"] < second["train done"] < second["first new answer"]
