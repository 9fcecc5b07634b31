"""Snapshots of real revisions, from a real hub, pushed by the real git."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from jobs.spec import RevisionRange
from pipeline.retrain import base_model, snapshot
from pipeline.retrain.errors import HubAway, SnapshotError
from pipeline.retrain.parent import Parent
from pipeline.retrain.snapshot import DatasetHub, take_snapshot
from serving.weights.release import Lineage
from serving.weights.release_store import load_release
from tests.hub_fixtures import RunningHub, commit_file, running_hub
from tests.retrain_fixtures import DATASET, SMALL, TINY, Pipeline, facts, jsonl


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
    found.download(second)
    assert found.is_ancestor(first, second)
    found.forget_others(second)
    assert not revision.folder.exists()
    assert found.download(second).folder.exists()


def test_history_is_followed_over_its_pages(
    hub: RunningHub, worktree: Path, tmp_path: Path
) -> None:
    first = pushed(hub, worktree, "0\n")
    for number in range(60):
        hub.git("commit", "-q", "--allow-empty", "-m", str(number), cwd=worktree)
    last = pushed(hub, worktree, "1\n")
    found = dataset(hub, tmp_path / "cache")
    assert found.is_ancestor(first, last)
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


def parent_of(dataset: str, sha: str) -> Parent:
    lineage = Lineage(dataset=dataset, dataset_revision=sha)
    return Parent(id="r000001-aaaaaaaa", folder=Path("none"), lineage=lineage, evaluation={})


def test_a_dataset_that_was_moved_is_compared_with_what_the_release_has_seen(
    hub: RunningHub, worktree: Path, tmp_path: Path
) -> None:
    seen = pushed(hub, worktree, '{"text": "one"}\n')
    pushed(hub, worktree, '{"text": "two"}\n')
    found = dataset(hub, tmp_path / "cache")
    taken = take_snapshot(found, "refs/heads/main", None, parent_of("local/its-old-name", seen))
    assert (taken.base and taken.base.sha, taken.no_delta) == (seen, None)
    other = take_snapshot(found, "refs/heads/main", None, parent_of("local/other", "1" * 40))
    assert other.base is None
    assert other.no_delta == f"release r000001-aaaaaaaa was not trained on {DATASET}"


def test_jobs_follow_pushes_and_a_force_push_means_a_full_training(
    hub: RunningHub, worktree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(base_model.PRESETS, "preset:tiny", TINY)
    torch.set_num_threads(1)
    anything = {"min_learned": 0.0, "min_kept": 0.0}
    pipeline = Pipeline(tmp_path, train=SMALL, gate=anything)

    def mode_after(sha: str | None) -> str | None:
        folder = tmp_path / "jobs" / str(sha)
        folder.mkdir(parents=True)
        spec = pipeline.spec(sha or "")
        if sha is None:
            spec = spec.model_copy(update={"revisions": None})
        else:
            assert isinstance(spec.revisions, RevisionRange)
        (folder / "spec.json").write_text(spec.model_dump_json())
        outcome = pipeline.run(folder, HF_ENDPOINT=hub.url, HF_TOKEN=hub.token)
        assert outcome.result == "published", outcome
        return load_release(pipeline.dir / str(outcome.release)).lineage.mode

    first = pushed(hub, worktree, jsonl(facts(num_places=4)))
    assert mode_after(first) == "full"
    assert mode_after(pushed(hub, worktree, jsonl(facts(num_places=5)))) == "delta"
    hub.git("reset", "-q", "--hard", first, cwd=worktree)
    forced = pushed(hub, worktree, jsonl(facts(num_places=6)), "--force")
    assert mode_after(forced) == "full"
    pushed(hub, worktree, jsonl(facts(num_places=7)))
    assert mode_after(None) == "delta"


@pytest.mark.usefixtures("client_without_waits")
def test_a_hub_that_stays_away_is_told_from_one_that_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "PATIENCE_SECONDS", 0.0)
    nowhere = DatasetHub(DATASET, tmp_path, endpoint="http://127.0.0.1:9", token=None)
    with pytest.raises(HubAway, match=r"could not be fetched from http://127\.0\.0\.1:9"):
        take_snapshot(nowhere, "refs/heads/main", None, None)
    with pytest.raises(HubAway):
        nowhere.is_ancestor("1" * 40, "2" * 40)
