"""Snapshots of real revisions, from a real hub, pushed by the real git."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.retrain.errors import HubAway, SnapshotError
from pipeline.retrain.job import take_snapshot
from pipeline.retrain.sources import DatasetHub
from tests.hub_fixtures import RunningHub, commit_file, running_hub
from tests.retrain_fixtures import DATASET, seen_by_a_release


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningHub]:
    with running_hub(tmp_path_factory.mktemp("hub")) as running:
        yield running


@pytest.fixture
def worktree(hub: RunningHub, tmp_path: Path) -> Iterator[Path]:
    """A clone of the dataset, empty."""
    url = hub.create_dataset(DATASET)
    hub.git("clone", "-q", url, "clone", cwd=tmp_path)
    yield tmp_path / "clone"
    hub.api.delete_repo(DATASET, repo_type="dataset")


def pushed(hub: RunningHub, worktree: Path, content: str, *options: str) -> str:
    sha = commit_file(hub, worktree, "data/rows.jsonl", content)
    hub.git("push", "-q", *options, "origin", "HEAD:main", cwd=worktree)
    return sha


def dataset(hub: RunningHub, cache_dir: Path, token: str | None = None) -> DatasetHub:
    return DatasetHub(DATASET, cache_dir, endpoint=hub.url, token=token or hub.token)


def test_a_revision_is_its_data_files_at_that_commit(
    hub: RunningHub, worktree: Path, tmp_path: Path
) -> None:
    (worktree / "README.md").write_text("hello")
    (worktree / ".hidden.json").write_text("[]")
    first = pushed(hub, worktree, '{"text": "one"}\n')
    second = pushed(hub, worktree, '{"text": "two"}\n')
    found = dataset(hub, tmp_path / "cache")
    assert found.head("refs/heads/main") == second
    revision = found.download(first)
    assert set(revision.files) == {".hidden.json", "README.md", "data/rows.jsonl"}
    assert (revision.folder / "data/rows.jsonl").read_text() == '{"text": "one"}\n'
    same = found.download(second).folder / "README.md"
    assert same.samefile(revision.folder / "README.md"), "only what changed is fetched"
    assert found.is_ancestor(first, second)
    found.forget_others(second)
    assert not revision.folder.exists()
    assert found.download(second).folder.exists()


def test_history_is_followed_over_its_pages_to_the_commit_that_is_looked_for(
    hub: RunningHub, worktree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pushed(hub, worktree, "0\n")
    first = pushed(hub, worktree, "1\n")
    for number in range(60):
        hub.git("commit", "-q", "--allow-empty", "-m", str(number), cwd=worktree)
    last = pushed(hub, worktree, "2\n")
    walked: list[str] = []
    history = DatasetHub._history

    def counted(self: DatasetHub, sha: str) -> Iterator[str]:
        for each in history(self, sha):
            walked.append(each)
            yield each

    monkeypatch.setattr(DatasetHub, "_history", counted)
    found = dataset(hub, tmp_path / "cache")
    assert found.is_ancestor(first, last)
    assert (walked[0], walked[-1], len(walked)) == (last, first, 62)
    assert not found.is_ancestor(last, first)


@pytest.mark.parametrize(
    ("name", "sha", "expected"),
    [
        (DATASET, "0" * 40, "no such revision"),
        ("me/nothing", "0" * 40, "no such dataset"),
    ],
)
def test_what_is_not_there_is_named(
    hub: RunningHub, worktree: Path, tmp_path: Path, name: str, sha: str, expected: str
) -> None:
    pushed(hub, worktree, "0\n")
    with pytest.raises(SnapshotError, match=expected) as caught:
        DatasetHub(name, tmp_path / "cache", endpoint=hub.url, token=hub.token).download(sha)
    assert name in str(caught.value)
    assert hub.url in str(caught.value)


@pytest.fixture
def client_without_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's client asks six times, and waits 23 s between its questions."""
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _: None)


def test_a_dataset_that_was_moved_is_compared_with_what_the_release_has_seen(
    hub: RunningHub, worktree: Path, tmp_path: Path
) -> None:
    seen = pushed(hub, worktree, '{"text": "one"}\n')
    pushed(hub, worktree, '{"text": "two"}\n')
    found = dataset(hub, tmp_path / "cache")
    taken = take_snapshot(
        found, "refs/heads/main", None, seen_by_a_release("local/its-old-name", seen)
    )
    assert (taken.base and taken.base.sha, taken.no_delta) == (seen, None)
    first = take_snapshot(found, "refs/heads/main", None, None)
    assert (first.base, first.no_delta) == (None, "there is no release to go on from")
    other = take_snapshot(
        found, "refs/heads/main", None, seen_by_a_release("local/other", "1" * 40)
    )
    assert other.base is None
    assert other.no_delta == f"release r000001-aaaaaaaa was not trained on {DATASET}"


@pytest.mark.usefixtures("client_without_waits")
def test_a_hub_that_stays_away_is_told_from_one_that_refuses(tmp_path: Path) -> None:
    nowhere = DatasetHub(DATASET, tmp_path, endpoint="http://127.0.0.1:9", token=None)
    with pytest.raises(HubAway, match=r"could not be fetched from http://127\.0\.0\.1:9"):
        take_snapshot(nowhere, "refs/heads/main", None, None)
    with pytest.raises(HubAway):
        nowhere.is_ancestor("1" * 40, "2" * 40)


def test_after_a_force_push_a_job_cannot_go_on_from_what_was_removed(
    hub: RunningHub, worktree: Path, tmp_path: Path
) -> None:
    first = pushed(hub, worktree, "1\n")
    removed = pushed(hub, worktree, "2\n")
    found = dataset(hub, tmp_path / "cache")
    found.download(removed)
    hub.git("reset", "-q", "--hard", first, cwd=worktree)
    pushed(hub, worktree, "3\n", "--force")
    after = take_snapshot(found, "refs/heads/main", None, seen_by_a_release(DATASET, first))
    assert (after.base and after.base.sha, after.no_delta) == (first, None)
    forced = take_snapshot(found, "refs/heads/main", None, seen_by_a_release(DATASET, removed))
    assert str(forced.no_delta).endswith("was removed (by a force-push)")
