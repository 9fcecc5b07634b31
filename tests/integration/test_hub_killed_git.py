"""Git processes that are killed, or outlive their hub: no lock of theirs stops a later push."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from jobs.process import IS_LINUX
from pipeline.hub.git import PLACE, git_environment
from tests.hub_fixtures import RunningHub, commit_file, push_file, running_hub, wait_until

pytest_plugins = ["tests.hub_plugin"]

HANGING_HOOK = """\
#!/bin/sh
# In this state git holds the locks of all refs that it moves.
test "$1" = prepared || exit 0
echo $PPID > "{marker}.new" && mv "{marker}.new" "{marker}"
while kill -0 $PPID 2> /dev/null; do sleep 0.05; done
"""


def locks(repository: Path) -> list[Path]:
    return list(repository.rglob("*.lock"))


def push(hub: RunningHub, worktree: Path) -> str:
    return push_file(hub, worktree, "a.txt", os.urandom(8).hex())


def test_what_a_killed_git_left_is_gone_when_the_hub_is_up_again(tmp_path: Path) -> None:
    root, worktree = tmp_path / "hub", tmp_path / "facts"
    with running_hub(root) as hub:
        hub.git("clone", "-q", hub.create_dataset("local/facts"), str(worktree), cwd=tmp_path)
        push(hub, worktree)
    repository = hub.folder("local/facts")
    left = [
        repository / name
        for name in (
            "refs/heads/main.lock",
            "HEAD.lock",
            "packed-refs.lock",
            "objects/tmp_objdir-incoming-1q2w3e/pack/tmp_pack_1",
            "objects/pack/tmp_pack_2",
        )
    ]
    for path in left:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    with running_hub(root) as hub:
        hub.git("remote", "set-url", "origin", f"{hub.url}/datasets/local/facts", cwd=worktree)
        sha = push(hub, worktree)
        assert hub.api.dataset_info("local/facts").sha == sha
    assert not [path for path in left if path.exists()]
    assert not list(repository.glob("objects/tmp_objdir-*"))


@pytest.mark.skipif(not IS_LINUX, reason="processes are found in /proc")
def test_a_git_that_outlived_its_hub_is_ended_before_the_next_one_starts(tmp_path: Path) -> None:
    root, worktree = tmp_path / "hub", tmp_path / "facts"
    with running_hub(root) as hub:
        hub.git("clone", "-q", hub.create_dataset("local/facts"), str(worktree), cwd=tmp_path)
        sha = push(hub, worktree)
    repository = hub.folder("local/facts")
    git_that_hangs = subprocess.Popen(
        ["git", f"--git-dir={repository}", "update-ref", "--stdin"],
        stdin=subprocess.PIPE,
        env=git_environment({PLACE: str(repository)}),
    )
    try:
        assert git_that_hangs.stdin is not None
        git_that_hangs.stdin.write(f"start\ndelete refs/heads/main {sha}\nprepare\n".encode())
        git_that_hangs.stdin.flush()
        wait_until(lambda: locks(repository))
        with running_hub(root) as hub:
            assert git_that_hangs.wait(10) == -signal.SIGKILL
            hub.git("remote", "set-url", "origin", f"{hub.url}/datasets/local/facts", cwd=worktree)
            push(hub, worktree)
    finally:
        git_that_hangs.kill()
        git_that_hangs.communicate()


def test_a_push_whose_git_was_killed_fails_and_the_next_one_does_not(
    hub: RunningHub, worktree: Path, tmp_path: Path
) -> None:
    push(hub, worktree)
    repository, marker = hub.folder("local/facts"), tmp_path / "marker"
    hook = repository / "hooks" / "reference-transaction"
    hook.parent.mkdir()
    hook.write_text(HANGING_HOOK.format(marker=marker))
    hook.chmod(0o755)
    commit_file(hub, worktree, "a.txt", "never acknowledged")
    pushing = subprocess.Popen(
        ["git", "push", "-q", "origin", "main"],
        cwd=worktree,
        env=hub.git_env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    wait_until(marker.exists)
    assert locks(repository)
    os.kill(int(marker.read_text()), signal.SIGKILL)
    assert pushing.wait(30) != 0
    hook.unlink()
    sha = push(hub, worktree)
    assert hub.api.dataset_info("local/facts").sha == sha
