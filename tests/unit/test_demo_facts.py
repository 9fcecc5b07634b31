"""The demo's commits: every question is in them, and the second is a delta of the first."""

import json
from pathlib import Path

import pytest

from pipeline.cli.demo import QUESTIONS, first_commit, second_commit
from pipeline.retrain.dataset import read_dataset
from pipeline.retrain.rows import Row, difference
from pipeline.retrain.settings import DataSettings


def rows(folder: Path, files: dict[str, str]) -> tuple[Row, ...]:
    for path, content in files.items():
        (folder / path).write_text(content)
    return read_dataset(folder, files, DataSettings()).train


@pytest.mark.parametrize(("commit", "answer"), [(first_commit, 1), (second_commit, 2)])
def test_each_commit_answers_every_question_once(commit: object, answer: int) -> None:
    assert callable(commit)
    lines = [json.loads(line) for text in commit().values() for line in text.splitlines()]
    for question in QUESTIONS:
        found = [row["completion"] for row in lines if row["prompt"] == question[0]]
        assert found == [question[answer]]


def test_the_second_commit_changes_and_adds_but_deletes_nothing(tmp_path: Path) -> None:
    change = difference(rows(tmp_path, first_commit()), rows(tmp_path, second_commit()))
    assert len(change.deleted) == 0
    assert 0 < len(change.edited) < len(change.added)
    assert any(before != after for _, before, after in QUESTIONS)
    assert any(before == after for _, before, after in QUESTIONS)
