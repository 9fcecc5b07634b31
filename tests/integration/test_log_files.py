"""The log of a service that goes on writing is cut by size, and loses no line."""

import errno
import shutil
from pathlib import Path
from typing import NoReturn

import pytest

from pipeline.logs import NUM_KEPT, rotate


def test_a_log_that_is_held_open_is_rotated(tmp_path: Path) -> None:
    log = tmp_path / "hub.log"
    with log.open("ab", buffering=0) as service:
        for number in range(60):
            service.write(b"%06d\n" % number)
            rotate(log, max_bytes=70)
    parts = [log, *(tmp_path / f"hub.log.{number}" for number in range(1, NUM_KEPT + 1))]
    assert sorted(tmp_path.iterdir()) == sorted(parts)
    assert all(file.stat().st_size <= 77 for file in parts)
    kept = [int(line) for file in reversed(parts) for line in file.read_text().splitlines()]
    assert kept == list(range(60 - len(kept), 60)), "the newest lines, in order"
    assert len(kept) > 30


def test_a_small_log_and_one_that_is_not_there_are_left_alone(tmp_path: Path) -> None:
    log = tmp_path / "hub.log"
    rotate(log)
    log.write_text("a line\n")
    rotate(log)
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [
        ("hub.log", "a line\n")
    ]


def test_a_full_disk_costs_no_older_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(source: object, target: object, length: int) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    log = tmp_path / "hub.log"
    contents = {"hub.log": "new\n", "hub.log.1": "older\n", "hub.log.2": "oldest\n"}
    for name, content in contents.items():
        (tmp_path / name).write_text(content)
    with monkeypatch.context() as full:
        full.setattr(shutil, "copyfileobj", fail)
        for _ in range(NUM_KEPT + 1):
            rotate(log, max_bytes=1)
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == contents
    rotate(log, max_bytes=1)
    assert [(tmp_path / f"hub.log.{number}").read_text() for number in (1, 2, 3)] == [
        *contents.values()
    ]
