"""A job that is killed goes on where it was."""

import json
import time
from pathlib import Path

import pytest
import torch

from jobs.outcome import JobOutcome
from pipeline.retrain import base_model
from pipeline.retrain.base_model import base_folder
from pipeline.retrain.checkpoint import Checkpoint
from pipeline.retrain.job_folder import read_record
from pipeline.retrain.metrics import read_metrics
from pipeline.retrain.rows import Row
from serving.weights.publish import publish_folder
from serving.weights.releases import load_release, release_ids
from tests.retrain_fixtures import SMALL, TINY, Pipeline, facts, jsonl


@pytest.fixture(autouse=True)
def tiny_preset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(base_model.PRESETS, "preset:tiny", TINY)
    torch.set_num_threads(1)


def test_a_killed_training_goes_on_and_ends_with_the_same_weights(tmp_path: Path) -> None:
    train = SMALL | {"max_tokens": 6_000, "max_epochs": 99.0, "checkpoint_seconds": 0.01}
    base = str(base_folder("preset:tiny", tmp_path, [Row(text=" ", file="a", number=0)], seed=0))
    whole, killed = (
        Pipeline(tmp_path / name, base_model=base, train=train) for name in ("whole", "killed")
    )
    rows = {"a.jsonl": jsonl(facts())}

    expected = whole.learn(rows)

    folder = killed.job(killed.commit(rows))
    process = killed.start(folder)
    while (saved := read_record(folder / "checkpoint.json", Checkpoint)) is None or saved.step < 4:
        assert process.poll() is None, (folder / "log.txt").read_text()
        time.sleep(0.005)
    process.kill()
    process.wait()
    saved = read_record(folder / "checkpoint.json", Checkpoint)
    assert saved is not None
    assert not saved.finished
    assert not (folder / "outcome.json").exists()

    outcome = killed.run(folder)
    assert outcome.result == expected.result == "published"
    metrics, _ = read_metrics(folder / "metrics.jsonl")
    steps = [metric.step for metric in metrics if metric.event == "step"]
    restarted = steps.index(saved.step + 1, len(steps) - 1 - steps[::-1].index(saved.step + 1))
    assert steps[restarted:] == list(range(saved.step + 1, saved.steps + 1))
    weights = [
        {name: tensor.digest for name, tensor in load_release(home.dir / str(id)).tensors.items()}
        for home, id in ((whole, expected.release), (killed, outcome.release))
    ]
    assert weights[0] == weights[1]


@pytest.mark.parametrize("lost", [(), ("release.json",)])
def test_a_job_that_had_published_only_promotes(tmp_path: Path, lost: tuple[str, ...]) -> None:
    """Also where it was killed between the release's rename and the record of it."""
    pipeline = Pipeline(tmp_path, train=SMALL | {"max_tokens": 500})
    folder = pipeline.job(pipeline.commit({"a.jsonl": jsonl(facts())}))
    first = pipeline.run(folder)
    (folder / "outcome.json").unlink()
    for name in ("metrics.jsonl", *lost):
        (folder / name).unlink()
    again = pipeline.run(folder)
    assert again.release == first.release
    assert again.dataset_revision == first.dataset_revision
    assert release_ids(pipeline.dir) == [first.release]
    metrics, _ = read_metrics(folder / "metrics.jsonl")
    assert {metric.stage for metric in metrics} == {"promote"}


def test_it_finds_its_release_below_those_that_no_job_made(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path, train=SMALL | {"max_tokens": 500})
    folder = pipeline.job(pipeline.commit({"a.jsonl": jsonl(facts())}))
    first = pipeline.run(folder)
    assert first.release is not None
    publish_folder(pipeline.dir, pipeline.dir / first.release)
    (pipeline.dir / "r000003-00000000").mkdir()
    for name in ("outcome.json", "release.json"):
        (folder / name).unlink()
    assert pipeline.run(folder).release == first.release
    assert len(release_ids(pipeline.dir)) == 3


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (None, "spec.json is missing"),
        ('{"command": ["x"], "settings": {"pipeline": "a"}}', "Field required"),
        (
            '{"command": ["x"], "settings": {"pipeline": "a", "dataset": "a/b", '
            '"releases_dir": "r", "bases_dir": "b", "kepe": 3}}',
            "spec.json: kepe: Extra inputs are not permitted",
        ),
        ("{", "Invalid JSON"),
    ],
)
def test_a_bad_spec_still_leaves_an_outcome(
    tmp_path: Path, spec: str | None, expected: str
) -> None:
    from pipeline.retrain.__main__ import main

    if spec is not None:
        (tmp_path / "spec.json").write_text(spec)
    assert main({"JOB_DIR": str(tmp_path), "JOB_ID": "j1"}) == 1
    outcome = JobOutcome.model_validate_json((tmp_path / "outcome.json").read_bytes())
    assert (outcome.result, outcome.job_id) == ("failed", "j1")
    assert expected in str(outcome.reason)


def test_an_unexpected_error_names_itself_and_leaves_the_traceback_to_the_log(
    tmp_path: Path,
) -> None:
    pipeline = Pipeline(tmp_path, releases_dir=str(tmp_path / "a-file/releases"), train=SMALL)
    (tmp_path / "a-file").write_text("not a folder")
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / "spec.json").write_text(pipeline.spec("0" * 40).model_dump_json())
    outcome = pipeline.run(folder)
    assert (outcome.result, outcome.stage) == ("failed", "snapshot")
    assert "NotADirectoryError" in str(outcome.reason)
    assert len(json.dumps(outcome.reason).splitlines()) == 1
