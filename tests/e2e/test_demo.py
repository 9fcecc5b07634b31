"""`pipeline demo`, as `make demo` runs it."""

import json

import pytest

from tests.stack_fixtures import Workplace, workplace

__all__ = ["workplace"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_demo_learns_both_commits_without_a_failed_request(workplace: Workplace) -> None:
    report = json.loads(workplace.run("demo", "--json", timeout=800))
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
    assert second["push answered"] < second["train done"] < second["first new token"]
