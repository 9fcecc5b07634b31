"""What lies in a pipeline's folder beside the weights: current, pending, counter, leftovers. A file
is replaced whole or not at all, and a writer that failed leaves nothing beside it."""

import errno
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from serving.errors import ReleaseError, Superseded
from serving.weights import release_store, verify
from serving.weights.atomic_file import atomic_file, link_atomically, write_atomically
from serving.weights.release import FileEntry, Release


def put(pipeline_dir: Path, release_id: str) -> str:
    folder = pipeline_dir / release_id
    folder.mkdir(parents=True)
    manifest = Release(
        id=release_id,
        pipeline="answers",
        created_at="2026-01-01T00:00:00+00:00",
        files={"config.json": FileEntry(size=0, sha256="")},
        tensors={},
    )
    (folder / "release.json").write_text(manifest.model_dump_json())
    return release_id


def test_releases_are_listed_by_number_and_broken_ones_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert release_store.list_releases(tmp_path / "nowhere") == []
    assert release_store.prune(tmp_path / "nowhere", keep=1) == []
    for release_id in ("r1000000-00000000", "r000002-ffffffff", "r000001-aaaaaaaa"):
        put(tmp_path, release_id)
    (tmp_path / "r000003-00000000").mkdir()
    (tmp_path / "notes").mkdir()
    release_store.set_current(tmp_path, "r000001-aaaaaaaa")
    found = [release.id for release in release_store.list_releases(tmp_path)]
    assert found == ["r000001-aaaaaaaa", "r000002-ffffffff", "r1000000-00000000"]
    assert "r000003-00000000" in caplog.text


def test_current_moves_in_one_step(tmp_path: Path) -> None:
    assert release_store.served_release(tmp_path) is None
    release_store.set_current(tmp_path, "r000001-aaaaaaaa")
    release_store.set_current(tmp_path, "r000002-ffffffff")
    assert release_store.served_release(tmp_path) == tmp_path / "r000002-ffffffff"
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".served.lock",
        "current",
        "served.json",
    ]
    assert os.readlink(tmp_path / "current") == "r000002-ffffffff"


def test_what_was_live_is_listed_without_what_was_gone_back_from(tmp_path: Path) -> None:
    assert release_store.served_or_empty(tmp_path).history == ()
    ids = [put(tmp_path, f"r{number:06d}-00000000") for number in range(1, 6)]
    for release in (ids[0], ids[2], ids[2], ids[3]):  # ids[1] was published, and never served
        release_store.set_current(tmp_path, release)
    assert release_store.served_or_empty(tmp_path).history == (ids[0], ids[2], ids[3])
    release_store.set_current(tmp_path, ids[2])
    release_store.set_current(tmp_path, ids[4])
    assert release_store.served_or_empty(tmp_path).history == (ids[0], ids[2], ids[4])


def test_a_release_that_stands_in_for_another_one_is_not_chosen(tmp_path: Path) -> None:
    ids = [put(tmp_path, f"r{number:06d}-00000000") for number in range(1, 4)]
    for release in ids:
        release_store.set_current(tmp_path, release)
    assert release_store.stood_in_for(tmp_path) is None
    release_store.set_current(tmp_path, ids[0], stands_in_for=ids[2])
    assert release_store.served_release(tmp_path) == tmp_path / ids[0]
    assert release_store.stood_in_for(tmp_path) == ids[2]
    assert release_store.served_or_empty(tmp_path).history == tuple(ids)
    # Only now somebody chooses it.
    release_store.set_current(tmp_path, ids[0])
    assert release_store.stood_in_for(tmp_path) is None
    assert release_store.served_or_empty(tmp_path).history == tuple(ids[:1])


def test_a_release_in_use_is_not_removed_and_the_reason_is_named(tmp_path: Path) -> None:
    served, pending, pinned, spare = (
        put(tmp_path, f"r{number:06d}-00000000") for number in range(1, 5)
    )
    release_store.set_current(tmp_path, served)
    release_store.set_pending(tmp_path, pending)
    release_store.pin(tmp_path, pinned)
    for release, reason in ((served, "served"), (pending, "pending"), (pinned, "pinned")):
        with pytest.raises(ReleaseError, match=f"{release} is not removed.* it is {reason}"):
            release_store.remove(tmp_path, release)
    (tmp_path / spare / "release.json").unlink()
    release_store.remove(tmp_path, spare)
    assert release_store.release_ids(tmp_path) == [served, pending, pinned]
    with pytest.raises(ReleaseError, match="is not a release in"):
        release_store.remove(tmp_path, spare)


def test_a_file_in_the_place_of_the_link_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "current").touch()
    release_store.set_current(tmp_path, "r000001-00000000")
    assert os.readlink(tmp_path / "current") == "r000001-00000000"


@pytest.mark.parametrize(
    "content", ["", "\0", '{"live": ["../elsewhere"]}', '{"pending": "seven"}']
)
def test_a_damaged_record_is_an_error_until_a_release_is_chosen(
    tmp_path: Path, content: str
) -> None:
    (tmp_path / "served.json").write_text(content)
    for read in (release_store.served_release, release_store.pending_release):
        with pytest.raises(ReleaseError, match=r"served\.json"):
            read(tmp_path)
    spare = put(tmp_path, "r000000-00000000")
    for drop in (release_store.prune, release_store.remove):  # nobody knows what is served
        with pytest.raises(ReleaseError, match=r"served\.json"):
            drop(tmp_path, 0 if drop is release_store.prune else spare)
    assert release_store.served_or_empty(tmp_path).release is None
    release_store.set_pending(tmp_path, "r000001-00000000")
    release_store.set_current(tmp_path, "r000001-00000000")
    assert release_store.served_or_empty(tmp_path).history == ("r000001-00000000",)


@pytest.mark.parametrize("other", ["r000001-aaaaaaaa", "r000003-cccccccc"])
def test_pending_is_cleared_by_itself_alone(tmp_path: Path, other: str) -> None:
    release_store.clear_pending(tmp_path, other)
    release_store.set_pending(tmp_path, "r000002-bbbbbbbb")
    release_store.clear_pending(tmp_path, other)
    assert release_store.pending_release(tmp_path) == "r000002-bbbbbbbb"
    release_store.clear_pending(tmp_path, "r000002-bbbbbbbb")
    assert release_store.pending_release(tmp_path) is None


def test_a_release_is_chosen_only_in_place_of_the_one_that_it_follows(tmp_path: Path) -> None:
    first, second, third, other = (f"r{number:06d}-aaaaaaaa" for number in range(1, 5))
    assert release_store.set_pending(tmp_path, first, instead_of=[None, first]) is None
    assert release_store.set_pending(tmp_path, first, instead_of=[None, first]) == first
    release_store.set_current(tmp_path, first)
    release_store.clear_pending(tmp_path, first)
    release_store.set_current(tmp_path, second)
    assert release_store.served_or_empty(tmp_path).chosen == second
    for late in ([first, third], [None, third], []):
        with pytest.raises(Superseded, match=f"{second} was chosen meanwhile, so {third} is not"):
            release_store.set_pending(tmp_path, third, instead_of=late)
        assert release_store.pending_release(tmp_path) is None
    release_store.set_current(tmp_path, first, stands_in_for=second)
    release_store.set_pending(tmp_path, third, instead_of=[second])
    release_store.set_pending(tmp_path, other)  # what a person asks for is chosen in any case
    assert release_store.served_or_empty(tmp_path).chosen == other


def test_of_many_that_follow_one_release_one_is_chosen_and_no_mark_gets_lost(
    tmp_path: Path,
) -> None:
    """Also while others clear their own marks. Processes share nothing else with each other."""
    ids = [f"r{number:06d}-aaaaaaaa" for number in range(1, 9)]
    for _ in range(20):
        (tmp_path / "served.json").unlink(missing_ok=True)
        start = threading.Barrier(len(ids) + 1)

        def choose(release: str, start: threading.Barrier = start) -> bool:
            start.wait()
            try:
                release_store.set_pending(tmp_path, release, instead_of=[None])
            except Superseded:
                release_store.clear_pending(tmp_path, release)
                return False
            return True

        def clear(start: threading.Barrier = start) -> bool:
            start.wait()
            for _ in range(10):
                release_store.clear_pending(tmp_path, "r000009-aaaaaaaa")
            return False

        with ThreadPoolExecutor(len(ids) + 1) as pool:
            cleared = pool.submit(clear)
            chosen = list(pool.map(choose, ids))
            cleared.result()
        assert [release for release, ok in zip(ids, chosen, strict=True) if ok] == [
            release_store.pending_release(tmp_path)
        ]


def test_prune_spares_served_pending_and_pinned(tmp_path: Path) -> None:
    ids = [put(tmp_path, f"r{number:06d}-00000000") for number in range(1, 8)]
    release_store.set_current(tmp_path, ids[0])
    release_store.set_pending(tmp_path, ids[1])
    release_store.pin(tmp_path, ids[2])
    assert release_store.prune(tmp_path, keep=2) == [ids[3], ids[4]]
    assert release_store.release_ids(tmp_path) == [*ids[:3], *ids[5:]]
    release_store.unpin(tmp_path, ids[2])
    assert release_store.prune(tmp_path, keep=0) == [ids[2], ids[5], ids[6]]


def test_prune_ends_what_a_killed_one_began(tmp_path: Path) -> None:
    ids = [put(tmp_path, f"r{number:06d}-00000000") for number in range(1, 4)]
    half = tmp_path / f".unfinished-{ids[0]}"
    (tmp_path / ids[0]).rename(half)
    assert release_store.prune(tmp_path, keep=2) == []
    assert not half.exists() and release_store.release_ids(tmp_path) == ids[1:]


def test_prune_removes_what_stood_in_the_place_of_a_link(tmp_path: Path) -> None:
    release_id = put(tmp_path, "r000001-00000000")
    shutil.copytree(tmp_path / release_id, tmp_path / "current")
    release_store.set_current(tmp_path, release_id)
    [copy] = tmp_path.glob(".unfinished-current-*")
    release_store.prune(tmp_path, keep=1)
    assert not copy.exists()
    assert release_store.served_release(tmp_path) == tmp_path / release_id


def test_only_a_release_can_be_pinned_and_only_a_pinned_one_unpinned(tmp_path: Path) -> None:
    release_id = put(tmp_path, "r000001-00000000")
    assert release_store.pinned_releases(tmp_path) == []
    with pytest.raises(ReleaseError, match="not a release"):
        release_store.pin(tmp_path, "r000002-00000000")
    with pytest.raises(ReleaseError, match="not pinned"):
        release_store.unpin(tmp_path, release_id)
    release_store.pin(tmp_path, release_id)
    release_store.pin(tmp_path, release_id)
    assert release_store.pinned_releases(tmp_path) == [release_id]


def test_a_number_is_never_given_twice(tmp_path: Path) -> None:
    assert release_store.next_number(tmp_path) == 1
    put(tmp_path, "r000007-00000000")
    assert release_store.next_number(tmp_path) == 8
    release_store.prune(tmp_path, keep=0)
    assert release_store.next_number(tmp_path) == 9
    (tmp_path / "counter").unlink()
    put(tmp_path, "r000020-00000000")
    assert release_store.next_number(tmp_path) == 21


@pytest.mark.parametrize("content", [b"", b"\0\0", b"seven\n", b"\xff"])
def test_a_damaged_counter_is_counted_from_the_releases(tmp_path: Path, content: bytes) -> None:
    put(tmp_path, "r000007-00000000")
    (tmp_path / "counter").write_bytes(content)
    assert release_store.next_number(tmp_path) == 8
    assert release_store.next_number(tmp_path) == 9


def test_leftovers_are_swept_unless_a_publisher_is_at_work(tmp_path: Path) -> None:
    put(tmp_path, "r000001-00000000")
    (tmp_path / ".unfinished-1").mkdir()
    (tmp_path / ".unfinished-1" / "model.safetensors").write_bytes(b"half")
    os.symlink("r000001-00000000", tmp_path / ".unfinished-2")
    os.symlink("r000001-00000000", tmp_path / ".replacing-1")
    os.utime(tmp_path / ".replacing-1", (0, 0), follow_symlinks=False)
    (tmp_path / ".replacing-2").write_text("r000001-00000000\n")

    def left() -> set[str]:
        return {path.name for path in tmp_path.iterdir()} - {".lock"}

    before = left()
    with release_store.release_lock(tmp_path):
        release_store.sweep(tmp_path)
    assert left() == before
    release_store.sweep(tmp_path)
    assert before - left() == {".replacing-1", ".unfinished-1", ".unfinished-2"}
    assert release_store.release_ids(tmp_path) == ["r000001-00000000"]


def test_a_manifest_that_cannot_be_read_is_damaged_unless_the_error_is_temporary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / put(tmp_path, "r000001-aaaaaaaa")
    number = errno.EMFILE

    def read_bytes(path: Path) -> bytes:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    for read in (release_store.load_release, verify.verify_release):
        with pytest.raises(OSError, match=os.strerror(number)):
            read(folder)
    number = errno.EIO
    with pytest.raises(ReleaseError, match="cannot be read"):
        release_store.load_release(folder)
    [reason] = verify.verify_release(folder)
    assert "cannot be read" in reason


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
