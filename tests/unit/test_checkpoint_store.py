"""Checkpoints that go on on another machine."""

import json
from pathlib import Path

import fsspec
import pytest

from pipeline.retrain import checkpoint_store
from pipeline.retrain.job import CHECKPOINT

URL = "memory://bucket/facts/j000001/0123-r000001"


def checkpoint(job_dir: Path, step: int) -> Path:
    """What a training leaves in the job's folder."""
    path = job_dir / f"checkpoints/step-{step}.pt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"state {step}")
    record = {"file": path.relative_to(job_dir).as_posix(), "step": step}
    (job_dir / CHECKPOINT).write_text(json.dumps(record))
    return path


def test_an_attempt_without_a_checkpoint_gets_the_newest_one(tmp_path: Path) -> None:
    here, there, new = (tmp_path / name for name in ("here", "there", "new"))
    for folder in (here, there, new):
        folder.mkdir()
    checkpoint_store.go_on_from(URL, here)
    assert not (here / CHECKPOINT).exists()
    for step in (1, 2):
        checkpoint_store.put(here, checkpoint(here, step))
    checkpoint_store.go_on_from(URL, there)
    assert (there / CHECKPOINT).read_text() == (here / CHECKPOINT).read_text()
    assert [each.name for each in (there / "checkpoints").iterdir()] == ["step-2.pt"]
    assert (there / "checkpoints/step-2.pt").read_text() == "state 2"

    checkpoint_store.put(there, checkpoint(there, 3))
    checkpoint_store.go_on_from(URL, here)
    assert json.loads((here / CHECKPOINT).read_text())["step"] == 2, "it has one of its own"
    files = fsspec.filesystem("memory")
    assert {Path(each).name for each in files.ls(URL, detail=False)} == {CHECKPOINT, "step-3.pt"}
    checkpoint_store.remove("memory://bucket/facts/j000001")
    assert not files.exists(URL)
    checkpoint_store.go_on_from(URL, new)
    assert not (new / CHECKPOINT).exists()


def test_an_error_of_the_store_is_told_and_fails_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    for url in ("nothing://bucket/j000001", f"{tmp_path}/file/j000001"):
        checkpoint_store.go_on_from(url, tmp_path)
        checkpoint_store.put(tmp_path, checkpoint(tmp_path, 1))
        assert f"checkpoints at {url}: " in caplog.messages[-1]
    checkpoint_store.remove("nothing://bucket/j000001")
    assert "nothing" in caplog.messages[-1]
