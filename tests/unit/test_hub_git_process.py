"""The hub ends a git process that needs too long, and notices one that fails."""

import logging
import os
from pathlib import Path

import pytest

from pipeline.hub.errors import TooSlow
from pipeline.hub.git import git
from pipeline.hub.repositories import Repository, RepositoryName
from pipeline.hub.routes.discussions import difference


@pytest.fixture
def stuck(tmp_path: Path) -> tuple[Path, tuple[str, ...]]:
    """A repository, and a command that waits for the writer of a pipe, which never comes."""
    git(tmp_path, "init", "-q", "--bare")
    os.mkfifo(tmp_path / "pipe")
    return tmp_path, ("config", "--file", str(tmp_path / "pipe"), "--list")


def test_git_that_waits_for_ever_is_too_slow(stuck: tuple[Path, tuple[str, ...]]) -> None:
    folder, command = stuck
    with pytest.raises(TooSlow, match=r"git config needed more than 0\.1 s"):
        git(folder, *command, seconds=0.1)


def test_a_difference_that_git_cannot_make_is_not_an_empty_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    git(tmp_path, "init", "-q", "--bare")
    tree = git(tmp_path, "mktree").decode().strip()
    who = {
        f"GIT_{role}_{field}": "ada"
        for role in ("AUTHOR", "COMMITTER")
        for field in ("NAME", "EMAIL")
    }
    one, other = (
        git(tmp_path, "commit-tree", tree, "-m", title, extra=who).decode().strip()
        for title in ("one", "other")
    )
    name = RepositoryName(type="dataset", owner="local", name="facts")
    facts = Repository(id="1", name=name, created_at=0, folder=tmp_path)
    assert difference(facts, one, one) == ""
    with caplog.at_level(logging.WARNING):
        assert "not shown, because git failed" in difference(facts, one, other)
    assert "no merge base" in caplog.text
