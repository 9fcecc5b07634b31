"""A file is replaced whole or not at all, and a writer that failed leaves nothing beside it."""

from pathlib import Path

import pytest

from serving.weights.atomic_file import atomic_file, link_atomically, write_atomically


def test_the_new_content_is_seen_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "counter"
    write_atomically(path, "one\n")
    with atomic_file(path) as file:
        file.write(b"two")
        assert path.read_text() == "one\n"
    assert path.read_bytes() == b"two"
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_that_fails_leaves_the_old_content_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "counter"
    write_atomically(path, "one\n")
    with pytest.raises(OSError, match="full"), atomic_file(path) as file:
        file.write(b"tw")
        raise OSError("the disk is full")
    assert path.read_text() == "one\n"
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_that_leads_there_already_is_not_written_again(tmp_path: Path) -> None:
    link = tmp_path / "current"
    link_atomically(link, "first")
    inode = link.lstat().st_ino
    link_atomically(link, "first")
    assert link.lstat().st_ino == inode
    link_atomically(link, "second")
    assert str(link.readlink()) == "second"
    assert list(tmp_path.iterdir()) == [link]
