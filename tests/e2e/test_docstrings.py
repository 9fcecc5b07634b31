"""The loop on real text that is on every machine: the docstrings of the standard library."""

import json
import sys

import pytest

from tests.docstring_stream import docstrings
from tests.stack_fixtures import Workplace, clone, configure, stack_up, workplace

__all__ = ["workplace"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_loss_falls_with_each_commit_and_the_second_is_served(
    workplace: Workplace,
) -> None:
    # Short ones, to save time.
    texts = [text for text in docstrings(10_000) if len(text) < 160]
    rows = [{"text": text} for text in texts[:1250]]
    assert len(rows) == 1250, sys.version
    # Less than the default budget: enough for each row to be seen once.
    configure(workplace, "docstrings", max_tokens=60_000, max_length=128)
    revisions = []
    with stack_up(workplace):
        checkout = clone(workplace, "docstrings")
        for upto in (1050, 1250):
            text = "".join(json.dumps(row) + "\n" for row in rows[:upto])
            revisions.append(checkout.push({"docstrings.jsonl": text}))
            job = workplace.wait_for_job(revisions[-1])
            assert job["outcome"]["result"] == "promoted", job["outcome"]

        releases = workplace.json("releases", "ls")
        status = workplace.json("status")
    newest, oldest = releases
    assert [oldest["dataset_revision"], newest["dataset_revision"]] == revisions
    assert status["pipelines"][0]["served"]["dataset_revision"] == revisions[-1]
    for release in releases:
        new_rows = release["evaluation"]["new"]
        assert new_rows["rows"] >= 20
        assert new_rows["loss"] < new_rows["served_loss"]
        counts = release["evaluation"]["counts"]
        assert counts["text_loss"] < counts["text_loss_before"]
        assert counts["changed"] == counts["not_trained"] == 0, "text is not counted"
        # A small share of so much text is held out, and is no part of what a commit adds.
        assert release["evaluation"]["held_out"]["rows"] >= 20
    assert newest["mode"] == "delta"
    known_rows = newest["evaluation"]["known"]
    assert known_rows["loss"] < known_rows["served_loss"] * 1.02
