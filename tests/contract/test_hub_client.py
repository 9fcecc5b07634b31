"""The hub seen by the unmodified `huggingface_hub` client."""

import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from unittest import mock

import httpx
import pytest
from huggingface_hub.errors import (
    BadRequestError,
    EntryNotFoundError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import paginate  # type: ignore[attr-defined]
from sqlalchemy.exc import OperationalError

from pipeline.hub.errors import HubError
from pipeline.hub.routes import administration, contents, git_http
from tests.hub_fixtures import Receiver, RunningHub, commit_file, push_file, wait_until

pytest_plugins = ["tests.hub_plugin"]


@pytest.fixture(autouse=True)
def sound(hub: RunningHub) -> Iterator[None]:
    yield
    hub.fsck()


@pytest.fixture
def pushed(hub: RunningHub, worktree: Path) -> str:
    """The sha of a commit with a README, and a file in a folder with a space in its name."""
    (worktree / "README.md").write_text("# Facts\n")
    sha = push_file(hub, worktree, "some data/train.jsonl", '{"text": "a"}\n' * 3)
    return sha


@pytest.mark.parametrize("type", ["dataset", "model", "space"])
def test_repositories_come_and_go(hub: RunningHub, type: str) -> None:
    options = {"space_sdk": "static"} if type == "space" else {}
    url = hub.api.create_repo("thing", repo_type=type, **options)
    assert (url.repo_id, url.repo_type, url.endpoint) == ("local/thing", type, hub.url)
    with pytest.raises(HfHubHTTPError, match="here already"):
        hub.api.create_repo("local/thing", repo_type=type, **options)
    assert hub.api.create_repo("local/thing", repo_type=type, exist_ok=True, **options) == url
    assert hub.api.repo_exists("local/thing", repo_type=type)
    hub.api.delete_repo("local/thing", repo_type=type)
    assert not hub.api.repo_exists("local/thing", repo_type=type)
    with pytest.raises(RepositoryNotFoundError):
        hub.api.delete_repo("local/thing", repo_type=type)
    hub.api.delete_repo("local/thing", repo_type=type, missing_ok=True)


def test_a_repository_moves_with_its_commits(hub: RunningHub, pushed: str) -> None:
    hub.api.move_repo("local/facts", "team/known-facts", repo_type="dataset")
    assert hub.api.dataset_info("team/known-facts").sha == pushed
    assert not hub.api.repo_exists("local/facts", repo_type="dataset")


def test_info_and_listings(hub: RunningHub, pushed: str) -> None:
    info = hub.api.dataset_info("local/facts", files_metadata=True)
    assert (info.id, info.sha, info.author) == ("local/facts", pushed, "local")
    assert info.last_modified is not None
    sizes = {file.rfilename: file.size for file in info.siblings or []}
    assert sizes == {"README.md": 8, "some data/train.jsonl": 42}
    assert hub.api.dataset_info("local/facts", revision=pushed).sha == pushed
    assert [one.id for one in hub.api.list_datasets(author="local")] == ["local/facts"]
    assert [one.id for one in hub.api.list_datasets(author="nobody")] == []


def test_trees_and_paths(hub: RunningHub, pushed: str) -> None:
    assert hub.api.list_repo_files("local/facts", repo_type="dataset") == [
        "README.md",
        "some data/train.jsonl",
    ]
    top = list(hub.api.list_repo_tree("local/facts", repo_type="dataset"))
    assert [one.path for one in top] == ["README.md", "some data"]
    inside = list(hub.api.list_repo_tree("local/facts", "some data", repo_type="dataset"))
    assert [one.path for one in inside] == ["some data/train.jsonl"]
    with pytest.raises(EntryNotFoundError):
        list(hub.api.list_repo_tree("local/facts", "none", repo_type="dataset"))
    found = hub.api.get_paths_info(
        "local/facts", ["README.md", "some data", "none", "../x"], repo_type="dataset"
    )
    assert [one.path for one in found] == ["README.md", "some data"]


def test_downloads(hub: RunningHub, pushed: str, tmp_path: Path) -> None:
    file = hub.api.hf_hub_download(
        "local/facts", "some data/train.jsonl", repo_type="dataset", cache_dir=tmp_path
    )
    assert Path(file).read_text() == '{"text": "a"}\n' * 3
    folder = hub.api.snapshot_download(
        "local/facts", repo_type="dataset", revision=pushed, cache_dir=tmp_path
    )
    assert Path(folder).name == pushed
    assert (Path(folder) / "README.md").read_text() == "# Facts\n"
    for path, revision, error in [
        ("x", "main", EntryNotFoundError),
        ("some data", "main", EntryNotFoundError),
        ("x", "none", RevisionNotFoundError),
    ]:
        with pytest.raises(error):
            hub.api.hf_hub_download(
                "local/facts", path, repo_type="dataset", revision=revision, cache_dir=tmp_path
            )
    with pytest.raises(RepositoryNotFoundError):
        hub.api.dataset_info("local/none")
    for revision in ("none", "0" * 40):
        with pytest.raises(RevisionNotFoundError):
            hub.api.dataset_info("local/facts", revision=revision)
    head = hub.request("HEAD", "/datasets/local/facts/resolve/main/x")
    assert (head.status_code, head.headers["x-repo-commit"]) == (404, pushed)


def test_refs_are_listed_made_and_deleted_as_events(
    hub: RunningHub, pushed: str, receiver: Receiver, webhook: str
) -> None:
    hub.api.create_branch("local/facts", branch="review/one", repo_type="dataset")
    with pytest.raises(HfHubHTTPError, match="already exists"):
        hub.api.create_branch("local/facts", branch="review/one", repo_type="dataset")
    hub.api.create_branch("local/facts", branch="review/one", repo_type="dataset", exist_ok=True)
    for name, reason in [
        ("review", "cannot exist together with refs/heads/review/one"),
        ("review/one/two", "cannot exist together with refs/heads/review/one"),
        ("x" * 251, "at most 250 bytes"),
        ("a" * 40, "the form of a commit's sha"),
    ]:
        with pytest.raises(BadRequestError, match=reason):
            hub.api.create_branch("local/facts", branch=name, repo_type="dataset", exist_ok=True)
        with pytest.raises(HfHubHTTPError):
            hub.api.dataset_info("local/facts", revision=name)
    hub.api.create_tag("local/facts", tag="v1", repo_type="dataset")
    message = "# Second\n\n\n# text"
    hub.api.create_tag("local/facts", tag="v2", tag_message=message, repo_type="dataset")
    folder = hub.folder("local/facts")
    told = hub.git("for-each-ref", "--format=%(contents)", "refs/tags/v2", cwd=folder)
    assert told == message
    refs = hub.api.list_repo_refs("local/facts", repo_type="dataset")
    assert {one.ref: one.target_commit for one in [*refs.branches, *refs.tags]} == {
        "refs/heads/main": pushed,
        "refs/heads/review/one": pushed,
        "refs/tags/v1": pushed,
        "refs/tags/v2": pushed,
    }
    info = hub.api.dataset_info("local/facts", revision="review/one")
    assert info.sha == pushed
    hub.api.delete_branch("local/facts", branch="review/one", repo_type="dataset")
    hub.api.delete_tag("local/facts", tag="v1", repo_type="dataset")
    with pytest.raises(BadRequestError, match="Cannot delete refs/heads/main"):
        hub.api.delete_branch("local/facts", branch="main", repo_type="dataset")
    received = receiver.wait_for(5)
    assert [one.json["updatedRefs"][0]["ref"] for one in received] == [
        "refs/heads/review/one",
        "refs/tags/v1",
        "refs/tags/v2",
        "refs/heads/review/one",
        "refs/tags/v1",
    ]


@pytest.mark.parametrize("branch", ["{", "x/{y}"])
def test_a_branch_may_have_braces_in_its_name(
    hub: RunningHub, pushed: str, branch: str, tmp_path: Path
) -> None:
    on = {"repo_id": "local/facts", "repo_type": "dataset", "revision": branch}
    hub.api.create_branch("local/facts", branch=branch, repo_type="dataset")
    assert hub.api.dataset_info("local/facts", revision=branch).sha == pushed
    assert hub.api.list_repo_files(**on) == ["README.md", "some data/train.jsonl"]
    hub.api.upload_file(path_or_fileobj=b"1", path_in_repo="a{1}.txt", **on)
    file = hub.api.hf_hub_download(filename="a{1}.txt", cache_dir=tmp_path, **on)
    assert Path(file).read_text() == "1"


@pytest.mark.parametrize("count", [2_500, pytest.param(10_000, marks=pytest.mark.slow)])
def test_many_commits_are_listed(
    hub: RunningHub, worktree: Path, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = "".join(
        f"commit refs/heads/main\ncommitter Ada <ada@example.org> {1700000000 + number} +0000\n"
        f"data <<END\nCommit {number}\nEND\nM 644 inline n.txt\ndata <<END\n{number}\nEND\n\n"
        for number in range(count)
    )
    subprocess.run(
        ["git", "fast-import", "--quiet"],
        input=stream.encode(),
        cwd=worktree,
        env=hub.git_env,
        check=True,
    )
    hub.git("push", "-q", "origin", "main", cwd=worktree)
    commits = hub.api.list_repo_commits("local/facts", repo_type="dataset")
    assert [one.title for one in commits] == [f"Commit {n}" for n in reversed(range(count))]

    # The hub makes only the pages that are read, and a push between them moves nothing.
    pages = mock.Mock(wraps=contents.list_commits)
    monkeypatch.setattr(contents, "list_commits", pages)
    headers = {"Authorization": f"Bearer {hub.token}"}
    url = f"{hub.url}/api/datasets/local/facts/commits/main"
    read = paginate(url, params={"limit": 3}, headers=headers)
    first = [next(read)["id"] for _ in range(3)]
    push_file(hub, worktree, "late.txt", "1")
    assert [*first, next(read)["id"]] == [one.commit_id for one in commits[:4]]
    assert [call.kwargs["skip"] for call in pages.call_args_list if "skip" in call.kwargs] == [0, 3]


def test_an_empty_repository_says_so(hub: RunningHub, worktree: Path) -> None:
    info = hub.api.dataset_info("local/facts")
    assert (info.sha, info.siblings) == (None, [])
    for read in (
        lambda: hub.api.list_repo_files("local/facts", repo_type="dataset"),
        lambda: hub.api.snapshot_download("local/facts", repo_type="dataset", revision="main"),
        lambda: hub.api.list_repo_commits("local/facts", repo_type="dataset"),
    ):
        with pytest.raises(RevisionNotFoundError, match="no commit yet"):
            read()


def test_the_request_after_a_failure_of_the_hub_is_answered(
    hub: RunningHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise HubError("nobody foresaw this")

    monkeypatch.setattr(administration, "select", fail)
    headers = {"Authorization": f"Bearer {hub.token}"}
    with httpx.Client(base_url=hub.url, headers=headers, verify=False) as client:
        for _ in range(20):
            failed = client.get("/api/settings/tokens")
            assert (failed.status_code, failed.headers["connection"]) == (500, "close")
            assert "its log says where" in failed.json()["error"]
            assert client.get("/api/whoami-v2").status_code == 200


@pytest.mark.parametrize(
    ("fault", "status"), [("database or disk is full", 507), ("connection refused", 503)]
)
def test_a_push_that_the_database_cannot_record_says_why(
    hub: RunningHub, worktree: Path, monkeypatch: pytest.MonkeyPatch, fault: str, status: int
) -> None:
    def full(*_: object) -> None:
        raise OperationalError("INSERT", None, sqlite3.OperationalError(fault))

    commit_file(hub, worktree, "a.txt", "1")
    with monkeypatch.context() as patch:
        patch.setattr(git_http, "record_ref_changes", full)
        told = hub.git("push", "origin", "main", cwd=worktree, check=False)
        assert f"HTTP {status}" in told
    hub.git("push", "origin", "main", cwd=worktree)


def test_health_needs_no_token_and_metrics_count(
    hub: RunningHub, webhook: str, pushed: str
) -> None:
    assert httpx.get(f"{hub.url}/health").json() == {"status": "ok"}
    assert httpx.get(f"{hub.url}/live").json() == {"status": "ok"}
    assert httpx.get(f"{hub.url}/metrics").status_code == 401
    counted = 'hub_delivery_attempts_total{result="delivered"} 1.0'
    wait_until(lambda: counted in hub.request("GET", "/metrics").text)


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        ("DROP TABLE webhooks", "no such table: webhooks"),
        ("UPDATE sqlite_schema SET sql = 'x' WHERE name = 'webhooks'", "malformed database schema"),
    ],
)
def test_a_hub_that_cannot_read_its_database_says_so_and_counts_as_alive(
    hub: RunningHub, damage: str, fault: str
) -> None:
    with closing(sqlite3.connect(hub.root / "hub.sqlite")) as database, database:
        database.execute("PRAGMA writable_schema = ON")
        database.execute(damage)
        # The hub's connections read the schema anew when this has changed.
        (version,) = database.execute("PRAGMA schema_version").fetchone()
        database.execute(f"PRAGMA schema_version = {version + 1}")
    answer = httpx.get(f"{hub.url}/live")
    assert answer.status_code == 200  # a new start would not help
    assert fault in answer.json()["database"]


def test_a_change_of_a_repository_itself_is_told(
    hub: RunningHub, receiver: Receiver, webhook: str
) -> None:
    hub.create_dataset("local/one")
    hub.api.move_repo("local/one", "local/two", repo_type="dataset")
    hub.api.delete_repo("local/two", repo_type="dataset")
    told = [(one.json["event"], one.json["repo"]["name"]) for one in receiver.wait_for(3)]
    assert told == [
        ({"action": "create", "scope": "repo"}, "local/one"),
        ({"action": "move", "scope": "repo"}, "local/one"),
        ({"action": "delete", "scope": "repo"}, "local/two"),
    ]
    assert receiver.received[1].json["movedTo"]["name"] == "local/two"
    wait_until(lambda: len(hub.deliveries(webhook)) == 3)
