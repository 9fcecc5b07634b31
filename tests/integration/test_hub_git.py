"""The hub seen by the real git program."""

import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from tests.hub_fixtures import (
    Receiver,
    RunningHub,
    commit_file,
    git_env,
    push_file,
    run_git,
    wait_until,
)

pytest_plugins = ["tests.hub_plugin"]


def content_events(receiver: Receiver) -> list[tuple[str, str | None, str | None]]:
    """(ref, old sha, new sha) of each, in the order received."""
    return [
        (ref["ref"], ref["oldSha"], ref["newSha"])
        for one in receiver.received
        if one.json["event"]["scope"] == "repo.content"
        for ref in one.json["updatedRefs"]
    ]


def test_a_push_is_one_event_of_all_refs_that_it_moves(
    hub: RunningHub, worktree: Path, receiver: Receiver, webhook: str
) -> None:
    first = push_file(hub, worktree, "a.txt", "1")
    second = commit_file(hub, worktree, "a.txt", "2")
    hub.git("push", "-q", "origin", "main", "main:refs/heads/side", cwd=worktree)
    hub.git("reset", "-q", "--hard", first, cwd=worktree)
    other = commit_file(hub, worktree, "a.txt", "3")
    hub.git("push", "-q", "--force", "origin", "main", cwd=worktree)
    hub.git("tag", "v1", cwd=worktree)
    hub.git("push", "-q", "origin", "v1", cwd=worktree)
    hub.git("push", "-q", "origin", ":side", cwd=worktree)
    hub.git("push", "-q", "origin", "main", cwd=worktree)  # nothing to push, nothing to tell

    received = receiver.wait_for(5)
    wait_until(lambda: all(one["status"] == "delivered" for one in hub.deliveries(webhook)))
    assert [len(one.json["updatedRefs"]) for one in received] == [1, 2, 1, 1, 1]
    assert content_events(receiver) == [
        ("refs/heads/main", None, first),
        ("refs/heads/main", first, second),
        ("refs/heads/side", None, second),
        ("refs/heads/main", second, other),
        ("refs/tags/v1", None, other),
        ("refs/heads/side", second, None),
    ]


def test_what_was_left_behind_outlives_a_garbage_collection_and_no_client_sees_it(
    hub: RunningHub, worktree: Path, tmp_path: Path
) -> None:
    forced_away = push_file(hub, worktree, "a.txt", "1")
    hub.git("commit", "-q", "--amend", "-m", "Other", cwd=worktree)
    hub.git("push", "-q", "--force", "origin", "main", cwd=worktree)
    on_a_branch = commit_file(hub, worktree, "a.txt", "2")
    hub.git("push", "-q", "origin", "main:refs/heads/side", cwd=worktree)
    hub.git("push", "-q", "origin", ":side", cwd=worktree)
    by_api = commit_file(hub, worktree, "a.txt", "3")
    hub.git("push", "-q", "origin", "main:refs/heads/other", cwd=worktree)
    hub.api.delete_branch("local/facts", branch="other", repo_type="dataset")

    hub.request("POST", "/api/settings/gc").raise_for_status()

    for sha, text in [(forced_away, "1"), (on_a_branch, "2"), (by_api, "3")]:
        path = hub.api.snapshot_download(
            "local/facts", repo_type="dataset", revision=sha, cache_dir=tmp_path / "cache"
        )
        assert (Path(path) / "a.txt").read_text() == text
        copy = tmp_path / sha
        hub.git("init", "-q", str(copy), cwd=tmp_path)
        hub.git("fetch", "-q", f"{hub.url}/datasets/local/facts", sha, cwd=copy)
    listed = hub.request("GET", "/api/datasets/local/facts/refs").text
    assert forced_away not in listed


def test_a_push_cannot_change_what_a_sha_means(hub: RunningHub, worktree: Path) -> None:
    first = commit_file(hub, worktree, "a.txt", "honest")
    second = push_file(hub, worktree, "a.txt", "forged")
    # From an earlier hub, or by hand.
    folder = hub.folder("local/facts")
    git_dir = ("--git-dir", str(folder))
    run_git(*git_dir, "update-ref", f"refs/replace/{first}", second, cwd=worktree, env=hub.git_env)
    assert hub.request("GET", f"/datasets/local/facts/resolve/{first}/a.txt").text == "honest"
    assert "refs/replace" not in hub.git("ls-remote", "origin", cwd=worktree)


@pytest.mark.parametrize("ref", ["refs/pr/1", "refs/keep/mine", f"refs/replace/{'0' * 40}"])
def test_branches_and_tags_are_what_may_be_pushed(
    hub: RunningHub, worktree: Path, ref: str
) -> None:
    commit_file(hub, worktree, "a.txt", "1")
    said = hub.git("push", "origin", "main", f"main:{ref}", "main:v1", cwd=worktree, check=False)
    assert "remote: This hub only takes pushes to refs/heads/ and refs/tags/, and to" in said
    listed = hub.git("ls-remote", "origin", cwd=worktree).split()
    assert listed[1::2] == ["HEAD", "refs/heads/main", "refs/heads/v1"]


def test_a_commit_that_is_gone_keeps_no_later_one_out(
    hub: RunningHub, worktree: Path, receiver: Receiver, webhook: str
) -> None:
    gone = push_file(hub, worktree, "a.txt", "1")
    folder = hub.folder("local/facts")
    (folder / "refs/heads/main").unlink()
    (folder / "objects" / gone[:2] / gone[2:]).unlink()
    hub.git("commit", "-q", "--amend", "-m", "Other", cwd=worktree)
    hub.git("push", "-q", "origin", "main", cwd=worktree)
    sha = hub.git("rev-parse", "HEAD", cwd=worktree)
    receiver.wait_for(2)
    assert ("refs/heads/main", gone, sha) in content_events(receiver)


def test_a_git_suffixed_url_names_the_same_dataset(hub: RunningHub, worktree: Path) -> None:
    sha = commit_file(hub, worktree, "a.txt", "1")
    hub.git("push", "-q", f"{hub.url}/datasets/local/facts.git", "main", cwd=worktree)
    for path in ("datasets/local/facts.git", "datasets/local/facts"):
        listed = hub.git("ls-remote", f"{hub.url}/{path}", "refs/heads/main", cwd=worktree)
        assert listed.split() == [sha, "refs/heads/main"]


def test_a_push_of_two_requests_is_one_event(
    hub: RunningHub, worktree: Path, receiver: Receiver, webhook: str
) -> None:
    """Before a pack of more than 1 MiB, git asks whether it may push."""
    (worktree / "noise.bin").write_bytes(os.urandom(2_000_000))
    sha = push_file(hub, worktree, "small.txt", "x")
    receiver.wait_for(1)
    assert content_events(receiver) == [("refs/heads/main", None, sha)]


def test_concurrent_pushes_to_one_repository_are_one_event_each(
    hub: RunningHub, worktree: Path, receiver: Receiver, webhook: str, tmp_path: Path
) -> None:
    base = push_file(hub, worktree, "a.txt", "1")

    def push(number: int) -> tuple[str, None, str]:
        folder = tmp_path / f"clone{number}"
        hub.git("clone", "-q", f"{hub.url}/datasets/local/facts", str(folder), cwd=tmp_path)
        sha = commit_file(hub, folder, f"{number}.txt", "x")
        hub.git("push", "-q", "origin", f"main:refs/heads/b{number}", cwd=folder)
        return (f"refs/heads/b{number}", None, sha)

    with ThreadPoolExecutor(4) as pool:
        pushed = list(pool.map(push, range(6)))
    receiver.wait_for(7)
    assert sorted(content_events(receiver)) == sorted([("refs/heads/main", None, base), *pushed])


def test_a_wrong_token_and_none_are_refused(hub: RunningHub, worktree: Path) -> None:
    commit_file(hub, worktree, "a.txt", "1")
    wrong = run_git(
        "push", "origin", "main", cwd=worktree, env=git_env(hub.url, "wrong"), check=False
    )
    assert "Authentication failed" in wrong
    nobody = {**hub.git_env, "GIT_CONFIG_COUNT": "0"}
    assert "could not read Username" in run_git(
        "push", "origin", "main", cwd=worktree, env=nobody, check=False
    )
    assert hub.git("ls-remote", "origin", cwd=worktree) == ""


def test_an_unknown_repository_is_said_with_what_to_do(hub: RunningHub, worktree: Path) -> None:
    said = hub.git("ls-remote", f"{hub.url}/datasets/local/none", cwd=worktree, check=False)
    assert "hf repos create local/none --type dataset" in said


def test_a_tree_that_leads_outside_is_refused(hub: RunningHub, worktree: Path) -> None:
    git = partial(run_git, cwd=worktree, env=hub.git_env)
    blob = git("hash-object", "-w", "--stdin", stdin="x")
    commit = git("commit-tree", "-m", "Bad", git("mktree", stdin=f"100644 blob {blob}\t..\n"))
    said = hub.git("push", "origin", f"{commit}:refs/heads/main", cwd=worktree, check=False)
    assert "hasDotdot" in said


def test_requests_that_are_not_gits_are_refused(hub: RunningHub, worktree: Path) -> None:
    base = "/datasets/local/facts"
    for method, path, options in [
        ("GET", "/info/refs", {}),  # the dumb protocol
        ("GET", "/info/refs?service=git-shell", {}),
        ("POST", "/info/refs?service=git-upload-pack", {}),
        ("GET", "/git-receive-pack", {}),
        ("POST", "/git-receive-pack", {"content": b"0000"}),  # no content type
    ]:
        answer = hub.request(method, base + path, **options)
        assert answer.status_code in (400, 404), (method, path)
    headers = {"Content-Type": "application/x-git-receive-pack-request"}
    path = f"{base}/git-receive-pack"
    garbage = hub.request("POST", path, content=b"not a pkt-line", headers=headers)
    assert garbage.status_code in (200, 400, 500)  # git's own words; the hub goes on:
    assert hub.request("GET", "/health").status_code == 200
