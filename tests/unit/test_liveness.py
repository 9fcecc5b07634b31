"""What a probe says about a service that answers by touching a file."""

import errno
import os
from pathlib import Path

import pytest

from pipeline.stack.services import file_probe


def test_a_service_that_touches_its_file_works(tmp_path: Path) -> None:
    file = tmp_path / "alive"
    probe = file_probe(file)
    assert probe(1) == "silent"  # there is no file yet
    assert probe(1) == "silent"  # the probe's own touch is no answer
    for second in (1, 2):
        os.utime(file, (second, second))
        assert probe(1) == "works"
    assert probe(1) == "silent"


def test_in_a_read_only_folder_a_service_is_not_taken_for_hung(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "alive"
    file.touch()
    probe = file_probe(file)

    def refuse(path: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(Path, "touch", refuse)
    assert probe(1) == "unknown"
    monkeypatch.undo()
    assert probe(1) == "silent"
