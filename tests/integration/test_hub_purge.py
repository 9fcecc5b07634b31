"""`pipeline hub purge`: what must go is gone."""

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from jobs.outcome import JobOutcome
from jobs.spec import JobSpec, RevisionRange
from jobs.store import JobStore
from pipeline.cli.main import app
from pipeline.hub.errors import HubError
from pipeline.hub.routes import administration
from pipeline.paths import Home
from pipeline.runner.job_store import open_job_store
from pipeline.settings import load_settings
from pipeline.traces import needed_commits
from serving.weights import release_store
from serving.weights.release import RELEASE_FILE
from tests.hub_fixtures import (
    SECRET_KEY,
    TOKEN,
    RunningHub,
    commit_file,
    push_file,
    run_git,
    running_hub,
)
from tests.ports import free_ports
from tests.serving_fixtures import echo_release

SECRET = "the secret row that was pushed by mistake"


class Place:
    """A state folder, a clone, and three commits, of which the last two were pushed away again."""

    is_up = False

    def __init__(self, root: Path) -> None:
        self.root, self.home = root, Home(root / "state")
        self.worktree = root / "clone"

    def push_commits(self) -> None:
        with self.hub() as hub:
            url = hub.create_dataset("local/facts")
            self.folder = hub.folder("local/facts")
            hub.git("clone", "-q", url, str(self.worktree), cwd=self.root)
            self.good = self.push(hub, "rows.jsonl", "good")
            self.bad = self.push(hub, "rows.jsonl", SECRET)
            self.after = self.push(hub, "more.jsonl", "after")
            self.blob = hub.git("rev-parse", f"{self.bad}:rows.jsonl", cwd=self.worktree)

    def copy_to(self, root: Path) -> "Place":
        shutil.copytree(self.root, root, dirs_exist_ok=True)
        place = Place(root)
        place.good, place.bad, place.after, place.blob = self.good, self.bad, self.after, self.blob
        place.folder = root / self.folder.relative_to(self.root)
        return place

    @contextmanager
    def hub(self, **options: Any) -> Iterator[RunningHub]:
        with (
            running_hub(self.home.hub_dir, **options) as hub,
            pytest.MonkeyPatch.context() as patch,
        ):
            patch.setenv("PIPELINE_HUB__PORT", str(hub.settings.port))
            if self.worktree.exists():  # this hub is on another port
                url = f"{hub.url}/datasets/local/facts"
                hub.git("remote", "set-url", "origin", url, cwd=self.worktree)
            self.is_up = True
            try:
                yield hub
            finally:
                self.is_up = False

    def pipeline(self, *arguments: str) -> Result:
        """`pipeline hub …`, with a hub of the project if none is up."""
        with contextlib.ExitStack() as stack:
            if not self.is_up:
                store = stack.enter_context(open_job_store(load_settings(), self.home))
                stack.enter_context(
                    self.hub(needed_commits=partial(needed_commits, self.home, store))
                )
            return CliRunner().invoke(app, ["hub", *arguments])

    def purged(self, sha: str, *arguments: str) -> str:
        result = self.pipeline("purge", "local/facts", sha, "--yes", *arguments)
        assert result.exit_code == 0, result.exception
        return result.stdout

    def refused(self, sha: str, *arguments: str) -> str:
        error = self.pipeline("purge", "local/facts", sha, "--yes", *arguments).exception
        assert error is not None and not isinstance(error, SystemExit), error
        return str(error)

    def push(self, hub: RunningHub, file: str, content: str) -> str:
        return push_file(hub, self.worktree, file, content)

    def push_away(self, hub: RunningHub) -> None:
        hub.git("reset", "-q", "--hard", self.good, cwd=self.worktree)
        hub.git("push", "-q", "--force", "origin", "main", cwd=self.worktree)

    def git(self, *arguments: str, check: bool = True) -> str:
        git_dir = ("--git-dir", str(self.folder))
        return run_git(*git_dir, *arguments, cwd=self.root, env=dict(os.environ), check=check)

    def has(self, sha: str) -> bool:
        return "fatal" not in self.git("cat-file", "-t", sha, check=False)

    def holds_the_secret(self) -> list[str]:
        found = [
            str(path.relative_to(self.home.root))
            for path in self.home.root.rglob("*")
            if path.is_file() and SECRET.encode() in path.read_bytes()
        ]
        return found + [sha for sha in (self.bad, self.after, self.blob) if self.has(sha)]

    def spec(self, sha: str) -> JobSpec:
        range = RevisionRange(repo="local/facts", ref="refs/heads/main", new_sha=sha)
        return JobSpec(command=("true",), pipeline="facts", revisions=range)

    def run_job(self, store: JobStore, sha: str, **told: str) -> str:
        """A job of the commit, whose folder and whose downloads hold its rows."""
        spec = self.spec(sha)
        job = store.submit(spec)
        assert store.claim("me", 60) is not None
        folder = self.home.jobs_dir / job.id
        folder.mkdir()
        (folder / "spec.json").write_text(spec.model_dump_json())
        (folder / "log.txt").write_text(SECRET if sha == self.bad else "words")
        reason = f"not learned: {SECRET}" if sha == self.bad else None
        outcome = JobOutcome.model_validate({"result": "promoted", "reason": reason, **told})
        store.finish(job.id, "me", outcome)
        return job.id

    def release(
        self, number: int, revision: str, parent: str | None = None, base: str | None = None
    ) -> str:
        lineage = {"dataset": "local/facts", "dataset_revision": revision, "job_id": None}
        lineage |= {"parent": parent, "base_revision": base}
        return echo_release(self.home.releases_dir / "facts", number, **lineage).id

    def leave_traces(self) -> None:
        cache = self.home.snapshots_dir / "facts"
        for file in (
            cache / "datasets--local--facts/blobs/1",
            self.home.snapshots_dir
            / f"facts-of-the-old-name/datasets--local--before/snapshots/{self.bad}/rows.jsonl",
        ):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(SECRET)
        other = self.home.snapshots_dir / "lore" / "datasets--local--lore/snapshots/1/rows.jsonl"
        other.parent.mkdir(parents=True)
        other.write_text("other rows")


@pytest.fixture(scope="module")
def pushed(tmp_path_factory: pytest.TempPathFactory) -> Place:
    place = Place(tmp_path_factory.mktemp("pushed"))
    place.home.root.mkdir()
    (place.root / "pipeline.toml").write_text(
        '[[pipelines]]\nname = "facts"\ndataset = "local/facts"\n'
    )
    tokens = {"hub": TOKEN, "admin": "a", "webhook": "w", "key": SECRET_KEY.decode()}
    place.home.tokens_file.write_text(json.dumps(tokens))
    place.push_commits()
    return place


@pytest.fixture
def place(pushed: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    place = pushed.copy_to(tmp_path)
    monkeypatch.setenv("PIPELINE_HOME", str(place.home.root))
    monkeypatch.setenv("PIPELINE_SETTINGS", str(tmp_path / "pipeline.toml"))
    monkeypatch.setenv("PIPELINE_HUB__PORT", str(*free_ports(1)))
    return place


def test_a_purge_leaves_nothing_of_the_commit_and_names_the_releases(place: Place) -> None:
    place.leave_traces()
    with open_job_store(load_settings(), place.home) as store:
        good, bad = (place.run_job(store, sha) for sha in (place.good, place.bad))
    ids = [place.release(1, place.good), place.release(2, place.bad)]
    ids.append(place.release(3, place.good, parent=ids[1]))
    with place.hub() as hub:
        assert "refs/heads/main of the dataset local/facts still leads to" in place.refused(
            place.bad
        )
        place.push_away(hub)
        # As a collection of git leaves it: in a pack of objects that no branch leads to.
        place.git("gc", "-q")
        said = place.purged(place.bad)
    assert (
        f"{place.bad} is gone from the dataset local/facts. Removed: 2 commits; 1 job folders"
        in said
    )
    assert place.holds_the_secret() == []
    words = "was trained on a removed commit, or from the weights of such a release"
    assert [line for line in said.splitlines() if line.startswith("release ")] == [
        f"release {id} of facts {words}" for id in ids[1:]
    ]
    assert all((place.home.releases_dir / "facts" / id).is_dir() for id in ids)
    assert (place.home.jobs_dir / good).is_dir()
    assert (place.home.snapshots_dir / "lore" / "datasets--local--lore").is_dir()
    with open_job_store(load_settings(), place.home) as store:
        outcome = store.get(bad).outcome
        assert outcome is not None and outcome.reason is not None
        assert "was purged" in outcome.reason
    assert place.git("rev-parse", "refs/heads/main") == place.good
    assert "the purge is now complete" in place.refused(place.bad), "it may be run again"
    with place.hub() as hub:
        assert place.push(hub, "rows.jsonl", "better")


def test_what_lay_before_the_purged_commit_is_kept_as_it_was(place: Place) -> None:
    with place.hub() as hub:
        hub.git("checkout", "-q", "--orphan", "anew", cwd=place.worktree)
        fresh = commit_file(hub, place.worktree, "rows.jsonl", "fresh")
        hub.git("push", "-q", "--force", "origin", "anew:main", cwd=place.worktree)
    place.purged(place.bad)
    assert place.holds_the_secret() == []
    assert place.has(place.good) and place.has(fresh)
    place.pipeline("gc")
    assert place.has(place.good)
    assert place.git("for-each-ref", "refs/keep/") == ""


def test_a_purge_that_is_interrupted_is_run_again(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.leave_traces()
    with place.hub() as hub:
        place.push_away(hub)

    def fail(*_: object, **__: object) -> int:
        raise HubError("the hub is stopped")

    with monkeypatch.context() as patch:
        patch.setattr(administration, "sweep", fail)
        assert "answered 500" in place.refused(place.bad)
    assert place.has(place.bad)
    assert "is gone" in place.purged(place.bad)
    assert place.holds_the_secret() == []


def test_releases_go_if_told_and_a_served_one_keeps_all_as_it_is(place: Place) -> None:
    place.leave_traces()
    with place.hub() as hub:
        place.push_away(hub)
    folder = place.home.releases_dir / "facts"
    ids = [place.release(1, place.good), place.release(2, place.bad)]
    ids.append(place.release(3, place.good, parent=ids[1]))
    release_store.set_current(folder, ids[2])
    before = place.holds_the_secret()
    assert f"{ids[2]} is not removed, because it is served" in place.refused(
        place.bad, "--releases"
    )
    assert place.holds_the_secret() == before
    assert release_store.release_ids(folder) == ids
    release_store.set_current(folder, ids[0])
    asked = place.pipeline("purge", "local/facts", place.bad, "--releases").output
    assert "Purge the dataset local/facts? [y/N]" in asked
    assert release_store.release_ids(folder) == ids, "nobody has answered the question"
    said = place.purged(place.bad, "--releases")
    for words in (asked, said):
        assert f"; release {ids[1]} of facts; release {ids[2]} of facts" in words
    assert release_store.release_ids(folder) == ids[:1]
    assert place.holds_the_secret() == []


def test_a_release_is_found_although_the_one_before_it_is_gone(place: Place) -> None:
    ids = [place.release(1, place.bad)]
    ids += [place.release(2, place.good, ids[0]), place.release(3, place.good)]
    with open_job_store(load_settings(), place.home) as store:
        place.run_job(store, place.bad, release=ids[0], dataset_revision=place.bad)
    folder = place.home.releases_dir / "facts"
    release_store.remove(folder, ids[0])
    with place.hub() as hub:
        place.push_away(hub)
    assert f"release {ids[1]} of facts was trained on a removed commit, or" in place.purged(
        place.bad
    )
    place.purged(place.bad, "--releases")
    assert release_store.release_ids(folder) == ids[2:]


def test_what_has_a_damaged_manifest_is_named(place: Place) -> None:
    damaged = place.home.releases_dir / "facts" / place.release(1, place.bad)
    (damaged / RELEASE_FILE).write_text("{")
    with place.hub() as hub:
        place.push_away(hub)
    for arguments in ([], ["--releases"]):
        said = place.pipeline("purge", "local/facts", place.bad, "--yes", *arguments).stdout
        assert f"{damaged} stays, because its manifest cannot be read." in said
        assert f"To remove it: rm -r {damaged}" in said
        assert damaged.is_dir()


def test_what_would_be_pulled_from_under_a_job_is_refused(place: Place) -> None:
    with place.hub() as hub:
        place.push_away(hub)
    with open_job_store(load_settings(), place.home) as store:
        for sha in (place.good, place.bad):
            job = store.submit(place.spec(sha), by_hand=True)
            if sha == place.good:
                assert store.claim("me", 60) is not None
                runs = job.id
        words = place.refused(place.bad)
        assert f"{job.id} (SCHEDULING), {runs} (RUNNING) may still read these commits" in words
        store.cancel(job.id)
        store.finish(runs, "me", None)
    place.purged(place.bad)
    assert place.holds_the_secret() == []


def test_a_purge_of_a_model_leaves_the_dataset_of_the_same_name_alone(place: Place) -> None:
    place.leave_traces()
    traces = [path for path in place.home.snapshots_dir.rglob("*") if path.is_file()]
    place.release(1, place.bad)
    with place.hub() as hub:
        push_model(place, hub)
        with open_job_store(load_settings(), place.home) as store:
            store.submit(place.spec(place.bad))
            assert store.claim("me", 60) is not None
        asked = place.pipeline("purge", "local/facts", place.bad, "--type", "model").output
        assert "removes for good: 2 commits. Purge the model local/facts?" in asked
        said = place.purged(place.bad, "--type", "model")
    assert said.splitlines() == [
        f"{place.bad} is gone from the model local/facts. Removed: 2 commits"
    ]
    assert place.has(place.bad), "the dataset's branch has it"
    assert all(path.exists() for path in traces)


def push_model(place: Place, hub: RunningHub) -> None:
    """Push the three commits to a model of the same name, and push the last two away again."""
    hub.api.create_repo("local/facts")
    model = f"{hub.url}/local/facts"
    hub.git("push", "-q", "--force", model, "main", cwd=place.worktree)
    hub.git("push", "-q", "--force", model, f"{place.good}:main", cwd=place.worktree)


def test_a_purge_of_a_model_finds_what_jobs_have_made_of_their_base_model(place: Place) -> None:
    bases = place.home.bases_dir / "hub"
    # As pipeline.toml spells the name.
    base, other = bases / "models--Local--facts", bases / "models--local--other"
    for file in (base / "blobs/1", base / f"snapshots/{place.bad}/a", other / "snapshots/1/a"):
        file.parent.mkdir(parents=True)
        file.write_text("weights")
    ids = [place.release(1, place.bad), place.release(2, place.good, base=place.bad)]
    with place.hub() as hub:
        push_model(place, hub)
        with open_job_store(load_settings(), place.home) as store:
            spec = JobSpec(command=("true",), settings={"base_model": "Local/facts@main"})
            job = store.submit(spec)
            assert store.claim("me", 60) is not None
            words = place.refused(place.bad, "--type", "model")
            assert f"{job.id} (RUNNING) may still read these commits" in words
            store.finish(job.id, "me", None)
        said = place.purged(place.bad, "--type", "model")
    assert f"Removed: 2 commits; {base}\n" in said
    assert f"release {ids[1]} of facts was trained from a removed commit, or" in said
    assert f"release {ids[0]}" not in said
    assert list(bases.iterdir()) == [other]
    place.purged(place.bad, "--type", "model", "--releases")
    assert release_store.release_ids(place.home.releases_dir / "facts") == ids[:1]


def test_a_commit_that_is_only_left_in_downloads_is_removed_there(place: Place) -> None:
    lost = "1" * 40
    place.leave_traces()
    words = place.refused(lost)
    assert f"the dataset local/facts does not have the commit {lost}" in words
    assert "check the sha" in words
    rows = place.home.snapshots_dir / "facts" / f"datasets--local--facts/snapshots/{lost}/a.jsonl"
    rows.parent.mkdir(parents=True)
    rows.write_text(SECRET)
    assert "no commits, because none is in the repository" in place.purged(lost)
    assert not rows.exists()


def test_what_is_no_commit_is_refused(place: Place) -> None:
    assert "give all 40 digits" in place.refused("main")
    assert "is a blob, not a commit: give the sha of the commit" in place.refused(place.blob)
