"""The hub ends a git process that needs too long."""

import os
from pathlib import Path

import pytest

from pipeline.hub.errors import TooSlow
from pipeline.hub.git.process import git, git_beginning


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


def test_the_beginning_of_an_output_has_a_time_limit_too(
    stuck: tuple[Path, tuple[str, ...]],
) -> None:
    folder, command = stuck
    with pytest.raises(TooSlow, match=r"git config needed more than 0\.1 s"):
        git_beginning(folder, *command, max_bytes=100, seconds=0.1)
    assert git_beginning(folder, "version", max_bytes=11, seconds=60) == b"git version"
