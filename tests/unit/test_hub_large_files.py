"""The store of large files: what comes in is whole and right, or not there."""

import asyncio
import hashlib
import os
import random
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pipeline.formats import MAX_POINTER_BYTES, MIN_POINTER_BYTES, Pointer
from pipeline.hub.errors import BadRequest, Conflict
from pipeline.hub.large_files import CHUNK_BYTES, LargeFiles

CONTENT = random.Random(17).randbytes(2 * CHUNK_BYTES + 17)
OID = hashlib.sha256(CONTENT).hexdigest()
POINTER = Pointer(oid=OID, size=len(CONTENT))


async def pieces(content: bytes, size: int = 60_000) -> AsyncIterator[bytes]:
    for start in range(0, len(content), size):
        yield content[start : start + size]


def receive(files: LargeFiles, content: bytes, oid: str = OID, size: int = len(CONTENT)) -> None:
    asyncio.run(files.receive(pieces(content), oid, size))


def on_disk(folder: Path) -> list[str]:
    return [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]


@pytest.fixture
def files(tmp_path: Path) -> LargeFiles:
    return LargeFiles(tmp_path)


def test_what_came_is_read_back_from_the_layout_of_git_lfs(
    files: LargeFiles, tmp_path: Path
) -> None:
    assert files.size(OID) is None
    receive(files, CONTENT)
    assert files.size(OID) == len(CONTENT)
    assert on_disk(tmp_path) == [f"lfs/objects/{OID[:2]}/{OID[2:4]}/{OID}"]
    assert files.path(OID).read_bytes() == CONTENT
    assert list(files.oids()) == [OID]


@pytest.mark.parametrize(
    ("content", "oid", "size", "reason"),
    [
        (CONTENT[:-1], OID, len(CONTENT), "bytes came instead of"),
        (CONTENT + b"x", OID, len(CONTENT), "sent more"),
        (CONTENT[:-1] + b"x", OID, len(CONTENT), "the file changed while it was sent"),
        (CONTENT, OID, -1, "announced -1 bytes"),
        (b"", OID, 0, "has the sha256 e3b0c442"),
        (CONTENT, OID.upper(), len(CONTENT), "in lower case"),
        (CONTENT, "../" * 21 + "x", len(CONTENT), "is not a sha256"),
    ],
    ids=["truncated", "too long", "changed", "negative", "empty", "upper case", "path"],
)
def test_what_is_not_as_announced_leaves_nothing(
    files: LargeFiles, tmp_path: Path, content: bytes, oid: str, size: int, reason: str
) -> None:
    with pytest.raises(BadRequest, match=reason):
        receive(files, content, oid, size)
    assert on_disk(tmp_path) == []


def test_two_clients_bring_the_same_file_at_once(files: LargeFiles, tmp_path: Path) -> None:
    async def both() -> None:
        await asyncio.gather(*(files.receive(pieces(CONTENT), OID, len(CONTENT)) for _ in range(2)))

    asyncio.run(both())
    assert len(on_disk(tmp_path)) == 1
    assert files.path(OID).read_bytes() == CONTENT


def test_a_repository_that_is_removed_meanwhile_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "facts"
    folder.mkdir()

    async def removed() -> AsyncIterator[bytes]:
        yield CONTENT
        folder.rename(tmp_path / "aside")

    with pytest.raises(Conflict, match="was removed"):
        asyncio.run(LargeFiles(folder).receive(removed(), OID, len(CONTENT)))
    assert not folder.exists()


def test_only_old_files_that_nothing_names_are_removed(files: LargeFiles) -> None:
    other = files.store([b"other"], None, 5)
    receive(files, CONTENT)
    assert files.remove_others({OID}, grace_seconds=60) == 0
    an_hour_ago = time.time() - 3600
    for path in (files.path(OID), files.path(other)):
        os.utime(path, (an_hour_ago, an_hour_ago))
    assert files.keep(other)
    assert files.remove_others({OID}, grace_seconds=60) == 0
    os.utime(files.path(other), (an_hour_ago, an_hour_ago))
    assert files.remove_others({OID}, grace_seconds=60) == 5
    assert list(files.oids()) == [OID]
    assert not files.keep(other)


def test_a_pointer_is_read_as_it_is_written() -> None:
    text = POINTER.render()
    assert text == (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:%s\nsize %d\n"
        % (OID.encode(), len(CONTENT))
    )
    assert Pointer.parse(text) == POINTER
    assert Pointer.parse(text.rstrip()) == POINTER
    assert len(Pointer(oid=OID, size=0).render()) == MIN_POINTER_BYTES
    extended = text.replace(b"oid", b"ext-0-case sha256:" + b"0" * 64 + b"\noid")
    assert Pointer.parse(extended) == POINTER


@pytest.mark.parametrize(
    "wrong",
    [
        b"",
        POINTER.render() + b"\n",
        POINTER.render().replace(OID.encode(), OID[1:].encode()),
        POINTER.render().replace(b"size ", b"size -"),
        POINTER.render() + b" " * MAX_POINTER_BYTES,
        POINTER.render().replace(b"git-lfs.github.com", b"example.com"),
    ],
    ids=range(6),
)
def test_what_is_nearly_a_pointer_is_none(wrong: bytes) -> None:
    assert Pointer.parse(wrong) is None
