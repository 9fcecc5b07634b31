"""What jobs commit is stored as an event like any other, and told to nobody."""

from pathlib import Path

import pytest

from tests.hub_fixtures import Receiver, RunningHub, commit_file, run_git, wait_until

pytest_plugins = ["tests.hub_plugin"]

WATCHED = [{"type": "dataset", "name": "local/facts"}]
IN_A_JOB = {
    "GIT_COMMITTER_NAME": "job j000001",
    "GIT_COMMITTER_EMAIL": "j000001@jobs.hotpush.invalid",
}


def commit_in_a_job(hub: RunningHub, worktree: Path, text: str) -> str:
    (worktree / "made.txt").write_text(text)
    env = {**hub.git_env, **IN_A_JOB}
    run_git("add", "-A", cwd=worktree, env=env)
    run_git("commit", "-qm", text, cwd=worktree, env=env)
    return run_git("rev-parse", "HEAD", cwd=worktree, env=env)


def push(hub: RunningHub, worktree: Path) -> None:
    hub.git("push", "-q", "origin", "main", cwd=worktree)


def ranges(hub: RunningHub, id: str) -> list[tuple[str | None, str | None]]:
    """Of the deliveries, oldest first."""
    return [(one["old_sha"], one["new_sha"]) for one in reversed(hub.deliveries(id))]


@pytest.fixture
def told(hub: RunningHub, receiver: Receiver, worktree: Path) -> str:
    """The id of a webhook that was told of one commit of a person's."""
    id = hub.api.create_webhook(url=receiver.url, watched=WATCHED).id
    commit_file(hub, worktree, "a.txt", "1")
    push(hub, worktree)
    wait_until(lambda: [one["status"] for one in hub.deliveries(id)] == ["delivered"])
    return id


def test_a_push_of_a_job_fires_nothing_and_the_next_one_does(
    hub: RunningHub, told: str, worktree: Path
) -> None:
    made = commit_in_a_job(hub, worktree, "2")
    push(hub, worktree)
    assert hub.api.dataset_info("local/facts").sha == made
    assert len(ranges(hub, told)) == 1
    sha = commit_file(hub, worktree, "a.txt", "3")
    push(hub, worktree)
    assert ranges(hub, told)[1:] == [(made, sha)]


def test_a_push_with_a_persons_commit_among_a_jobs_fires(
    hub: RunningHub, told: str, worktree: Path
) -> None:
    commit_file(hub, worktree, "a.txt", "2")
    made = commit_in_a_job(hub, worktree, "3")
    push(hub, worktree)
    assert [new for _, new in ranges(hub, told)][1:] == [made]


def test_a_branch_of_known_commits_and_a_ref_that_goes_fire(
    hub: RunningHub, told: str, worktree: Path
) -> None:
    commit_in_a_job(hub, worktree, "2")
    push(hub, worktree)
    hub.git("push", "-q", "origin", "main:side", cwd=worktree)
    hub.git("push", "-q", "origin", ":side", cwd=worktree)
    assert len(ranges(hub, told)) == 3


def test_a_tag_of_something_that_is_no_commit_fires(
    hub: RunningHub, told: str, worktree: Path
) -> None:
    tree = hub.git("rev-parse", "HEAD^{tree}", cwd=worktree)
    hub.git("push", "-q", "origin", f"{tree}:refs/tags/tree", cwd=worktree)
    assert ranges(hub, told)[1:] == [(None, tree)]
