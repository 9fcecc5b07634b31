"""The hub ends a git process that needs too long, and notices one that fails."""

import os
from pathlib import Path

import pytest

from pipeline.hub.errors import BadRequest, HubError
from pipeline.hub.git import git
from pipeline.hub.repositories import Repository, RepositoryName, read_refs


def test_git_that_waits_for_ever_is_too_slow(tmp_path: Path) -> None:
    """It waits for the writer of a pipe, which never comes."""
    git(tmp_path, "init", "-q", "--bare")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BadRequest, match=r"git config needed more than 0\.1 s"):
        git(tmp_path, "config", "--file", str(tmp_path / "pipe"), "--list", seconds=0.1)


def commit(folder: Path) -> str:
    tree = git(folder, "mktree").decode().strip()
    who = {
        f"GIT_{role}_{field}": "ada"
        for role in ("AUTHOR", "COMMITTER")
        for field in ("NAME", "EMAIL")
    }
    return git(folder, "commit-tree", tree, "-m", "one", extra=who).decode().strip()


def test_only_a_ref_that_git_cannot_read_keeps_the_hub_from_the_others(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q", "--bare")
    of_facts = RepositoryName(type="dataset", owner="local", name="facts")
    facts = Repository(id="1", name=of_facts, created_at=0, folder=tmp_path)
    sha = commit(tmp_path)
    heads = tmp_path / "refs" / "heads"
    for name in ("main", "no..name"):  # git warns of the second one, which is no ref
        (heads / name).write_text(f"{sha}\n")
    assert read_refs(facts) == {"refs/heads/main": sha}
    (heads / "main").write_text("garbage\n")
    with pytest.raises(HubError, match="broken ref refs/heads/main"):
        read_refs(facts)
