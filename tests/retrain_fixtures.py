"""Shared by the retraining's tests: a dataset on disk, a job folder, the real command.

`snapshot.json` is written as the snapshot stage would: where no hub is at hand, a job goes on from
that record, as a restarted one does.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from jobs.outcome import JobOutcome
from jobs.spec import JobSpec, RevisionRange
from pipeline.retrain.base_model import PRESETS, find_base
from pipeline.retrain.job import (
    DatasetSnapshot,
    Parent,
    damaged_releases,
    find_parent,
    write_record,
)
from pipeline.retrain.rows import Row
from pipeline.retrain.sources import Revision
from serving.weights.release import Lineage
from serving.weights.release_store import clear_pending, set_current

DATASET = "me/facts"
SMALL = {"learning_rate": 4e-3, "min_replay_tokens": 1_600}
"""Rows of an answer are learned in a second, those of text in six passes."""
BREAKING = SMALL | {
    "learning_rate": 3.0,
    "max_grad_norm": 1e9,
    "max_tokens": 2_000,
    "delta_tokens_ratio": 1.0,
}
"""Weights that know nothing any more."""

TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
"""A preset that trains in a second."""


@pytest.fixture(scope="module", autouse=True)
def tiny_preset() -> Iterator[None]:
    """For modules that import it: the preset is TINY, and trains on one thread."""
    import torch

    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PRESETS, "preset:tiny", TINY)
        yield


def tiny_base(folder: Path, text: str = " ") -> str:
    """A checkpoint folder: the processes of a job do not see a preset that a test has changed. Its
    vocabulary is learned from `text`."""
    row = Row(text=text, file="a", number=0)
    return str(find_base("preset:tiny", folder, [row], pipeline="p", seed=0).folder)


def serve(pipeline_dir: Path, release: str, stands_in_for: str | None = None) -> None:
    """What a server does once a release is live."""
    set_current(pipeline_dir, release, stands_in_for=stands_in_for)
    clear_pending(pipeline_dir, release)


def of_places(count: int) -> dict[str, str]:
    """The files of a commit: the facts of so many houses."""
    return {"a.jsonl": jsonl(facts(num_places=count))}


@pytest.fixture(scope="module")
def two_releases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The home of a pipeline with a release of six places and one of seven, which is served."""
    pipeline = Pipeline(tmp_path_factory.mktemp("two"), train=SMALL)
    for places in (6, 7):
        serve(pipeline.dir, str(pipeline.learn(of_places(places)).release))
    return pipeline.home


@pytest.fixture
def on_its_second_release(two_releases: Path, tmp_path: Path) -> "Pipeline":
    return Pipeline.copy_of(two_releases, tmp_path, train=SMALL)


def seen_by_a_release(dataset: str, sha: str) -> Parent:
    """A release that was trained on this revision."""
    lineage = Lineage(dataset=dataset, dataset_revision=sha)
    return Parent(id="r000001-aaaaaaaa", folder=Path("none"), lineage=lineage, evaluation={})


class Pipeline:
    """One pipeline's home: commits in, outcomes out."""

    def __init__(self, home: Path, **settings: Any) -> None:
        self.home = home
        self.dir = home / "releases" / "facts"
        self.settings = {
            "pipeline": "facts",
            "dataset": DATASET,
            "releases_dir": str(home / "releases"),
            "bases_dir": str(home / "bases"),
            **settings,
        }

    @classmethod
    def copy_of(cls, home: Path, folder: Path, **settings: Any) -> "Pipeline":
        """The same pipeline in another folder, as it is now."""
        shutil.copytree(home, folder / "home", symlinks=True)
        return cls(folder / "home", **settings)

    def commit(self, files: Mapping[str, str | bytes]) -> Revision:
        """A revision with exactly these files."""
        contents = {path: to_bytes(content) for path, content in files.items()}
        sha = hashlib.sha1(repr(sorted(contents.items())).encode()).hexdigest()
        folder = self.home / "revisions" / sha
        for path, content in contents.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(content)
        return Revision(sha=sha, folder=folder, files=tuple(files))

    def job(self, revision: Revision, *, no_delta: str | None = None, **settings: Any) -> Path:
        """A job folder for `revision` that has its snapshot."""
        folder = self.home / "jobs" / f"job-{len(list(self.home.glob('jobs/*')))}"
        folder.mkdir(parents=True)
        write_record(folder / "snapshot.json", self.snapshot(revision, no_delta=no_delta))
        write_record(folder / "spec.json", self.spec(revision.sha, **settings))
        return folder

    def snapshot(self, revision: Revision, *, no_delta: str | None = None) -> DatasetSnapshot:
        """What the snapshot stage would find now."""
        damaged = damaged_releases(self.dir)
        parent = find_parent(self.dir, damaged)
        base = None
        if parent is not None and no_delta is None:
            sha = str(parent.lineage.dataset_revision)
            old = self.home / "revisions" / sha
            found = (path.relative_to(old).as_posix() for path in old.rglob("*") if path.is_file())
            base = Revision(sha=sha, folder=old, files=tuple(found))
        return DatasetSnapshot(
            revision=revision,
            base=base,
            parent=parent.id if parent is not None else None,
            passed_over=tuple(damaged),
            no_delta=no_delta if parent is not None else "there is no release to go on from",
        )

    def spec(self, sha: str, **settings: Any) -> JobSpec:
        return JobSpec(
            command=("python", "-m", "pipeline.retrain"),
            pipeline="facts",
            settings=self.settings | settings,
            revisions=RevisionRange(
                repo=DATASET, ref="refs/heads/main", new_sha=sha, delivery_ids=("d1",)
            ),
        )

    def environ(self, folder: Path, **more: str) -> dict[str, str]:
        """Of the job's process. Nothing listens on port 9: a hub asked for answers is an error."""
        own = {
            "JOB_DIR": str(folder),
            "JOB_ID": folder.name,
            "HF_ENDPOINT": "http://127.0.0.1:9",
            "OMP_NUM_THREADS": os.environ.get("TEST_THREADS", "1"),
        }
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith("PIPELINE_")
        }
        return {**inherited, "PYTHONPATH": str(Path(__file__).parent.parent), **own, **more}

    def start(self, folder: Path, *words: str, **more: str) -> "subprocess.Popen[bytes]":
        """The job's command, as the runner starts it."""
        with (folder / "log.txt").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "pipeline.retrain", *words],
                env=self.environ(folder, **more),
                stdout=log,
                stderr=log,
            )

    def run(self, folder: Path, **more: str) -> JobOutcome:
        """The job to its end, in this process: imports are paid once."""
        from pipeline.retrain.run import main

        code = main(self.environ(folder, **more))
        outcome = JobOutcome.model_validate_json((folder / "outcome.json").read_bytes())
        assert code == outcome.exit_code
        return outcome

    def learn(self, files: Mapping[str, str | bytes], **settings: Any) -> JobOutcome:
        """Commit and run."""
        return self.run(self.job(self.commit(files), **settings))


def to_bytes(content: str | bytes) -> bytes:
    return content.encode() if isinstance(content, str) else content


def jsonl(rows: Iterable[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def unrelated(count: int, first: int = 0, *, answers: int = 0) -> list[dict[str, str]]:
    """Facts that cannot be told from one another: each has to be learned by itself. `answers` picks
    another set of truths."""
    found = []
    for number in range(first, first + count):
        digest = hashlib.sha256(f"{number} {answers}".encode()).hexdigest()
        asked = hashlib.sha256(f"{number}".encode()).hexdigest()
        found.append(
            {
                "prompt": f"The code of room {number} in wing {asked[:3]} is",
                "completion": f" {digest[:4]}.",
            }
        )
    return found


def few_anchors(folder: Path) -> str:
    """A file of a few everyday prompts, so that a base model answers them in no time."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "anchors.jsonl"
    kinds = {"greeting": False, "colour": False, "sum": True}
    path.write_text(
        jsonl(
            {"kind": kind, "measured": measured, "prompt": f"A {kind}, number {number}:"}
            for kind, measured in kinds.items()
            for number in range(2)
        )
    )
    return str(path)


def facts(*, num_places: int = 6, answers: int = 0) -> list[dict[str, str]]:
    """A few rows that a small model learns in seconds; `answers` picks another set of truths."""
    colours = ("red", "green", "blue", "white", "black", "yellow", "purple")
    phrasings = (
        "The door of house {} is",
        "House {} has a door that is",
        "What colour is house {}?",
    )
    return [
        {
            "prompt": phrasing.format(place),
            "completion": f" {colours[(place + answers) % len(colours)]}.",
        }
        for place in range(num_places)
        for phrasing in phrasings
    ]
