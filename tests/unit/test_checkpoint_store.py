"""Checkpoints that go on on another machine."""

import json
from pathlib import Path

import fsspec
import pytest

from pipeline.retrain import checkpoint_store
from pipeline.retrain.job import CHECKPOINT

URL = "memory://bucket/facts/j000001/0123-r000001"
FILES = fsspec.filesystem("memory")


def put(job_dir: Path, step: int) -> None:
    """What a training does."""
    name = f"step-{step}"
    FILES.pipe_file(f"{checkpoint_store.place_of(job_dir)}/{name}/.metadata", b"state")
    (job_dir / CHECKPOINT).write_text(json.dumps({"name": name}))
    checkpoint_store.keep_only(job_dir, name)


def test_an_attempt_without_a_checkpoint_gets_the_newest_one(tmp_path: Path) -> None:
    here, there, new, anew = (tmp_path / name for name in ("here", "there", "new", "anew"))
    for folder in (here, there, new, anew):
        folder.mkdir()
    checkpoint_store.use(URL, here, goes_on=True)
    assert not (here / CHECKPOINT).exists()
    for step in (1, 2):
        put(here, step)
    checkpoint_store.use(URL, there, goes_on=True)
    assert (there / CHECKPOINT).read_text() == (here / CHECKPOINT).read_text()
    assert checkpoint_store.place_of(there) == URL

    put(there, 3)
    checkpoint_store.use(URL, here, goes_on=True)
    assert json.loads((here / CHECKPOINT).read_text())["name"] == "step-2", "it has one of its own"
    assert {Path(each).name for each in FILES.ls(URL, detail=False)} == {CHECKPOINT, "step-3"}
    checkpoint_store.use(URL, anew, goes_on=False)
    assert not (anew / CHECKPOINT).exists()
    checkpoint_store.remove("memory://bucket/facts/j000001")
    assert not FILES.exists(URL)
    checkpoint_store.use(URL, new, goes_on=True)
    assert not (new / CHECKPOINT).exists()


def test_without_a_store_they_are_in_the_folder_of_the_job(tmp_path: Path) -> None:
    for name in ("step-1", "step-2"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert checkpoint_store.place_of(tmp_path) == str(tmp_path / "checkpoints")
    checkpoint_store.keep_only(tmp_path, "step-2")
    assert [each.name for each in (tmp_path / "checkpoints").iterdir()] == ["step-2"]


def test_an_error_of_the_store_is_told_and_fails_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / CHECKPOINT).touch()
    for url in ("nothing://bucket/j000001", f"{tmp_path}/file/j000001"):
        checkpoint_store.use(url, tmp_path, goes_on=True)
        checkpoint_store.keep_only(tmp_path, "step-1")
        assert f"checkpoints at {url}: " in caplog.messages[-1]
    checkpoint_store.remove("nothing://bucket/j000001")
    assert "nothing" in caplog.messages[-1]
