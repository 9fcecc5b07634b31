"""What lies in a pipeline's folder beside the weights: current, pending, counter, leftovers."""

import os
from pathlib import Path

import pytest

from serving.errors import ReleaseError
from serving.weights import releases
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
    assert releases.list_releases(tmp_path / "nowhere") == []
    assert releases.prune(tmp_path / "nowhere", keep=1) == []
    for release_id in ("r1000000-00000000", "r000002-ffffffff", "r000001-aaaaaaaa"):
        put(tmp_path, release_id)
    (tmp_path / "r000003-00000000").mkdir()
    (tmp_path / "notes").mkdir()
    releases.set_current(tmp_path, "r000001-aaaaaaaa")
    found = [release.id for release in releases.list_releases(tmp_path)]
    assert found == ["r000001-aaaaaaaa", "r000002-ffffffff", "r1000000-00000000"]
    assert "r000003-00000000" in caplog.text


def test_current_moves_in_one_step(tmp_path: Path) -> None:
    assert releases.served_release(tmp_path) is None
    releases.set_current(tmp_path, "r000001-aaaaaaaa")
    releases.set_current(tmp_path, "r000002-ffffffff")
    assert releases.served_release(tmp_path) == tmp_path / "r000002-ffffffff"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["current", "previous"]


def test_what_was_served_before_is_known_and_a_way_forth_is_not(tmp_path: Path) -> None:
    first, second, third = (f"r00000{number}-00000000" for number in (1, 2, 3))
    releases.set_current(tmp_path, first)
    assert releases.previous_release(tmp_path) is None
    for release in (second, second, third):
        releases.set_current(tmp_path, release)
    assert releases.previous_release(tmp_path) == second
    releases.set_current(tmp_path, second)
    assert releases.previous_release(tmp_path) == second


@pytest.mark.parametrize("broken", ["current", "previous"])
def test_a_broken_link_is_replaced(tmp_path: Path, broken: str) -> None:
    (tmp_path / broken).symlink_to("/etc")
    assert releases.previous_release(tmp_path) is None
    for release in ("r000001-00000000", "r000002-00000000", "r000003-00000000"):
        releases.set_current(tmp_path, release)
    assert releases.served_release(tmp_path) == tmp_path / "r000003-00000000"
    assert releases.previous_release(tmp_path) == "r000002-00000000"


@pytest.mark.parametrize("target", ["../elsewhere", "/etc", "r000001"])
def test_a_link_that_names_no_release_is_an_error(tmp_path: Path, target: str) -> None:
    (tmp_path / "current").symlink_to(target)
    with pytest.raises(ReleaseError, match="not a release id"):
        releases.served_release(tmp_path)


@pytest.mark.parametrize("other", ["r000001-aaaaaaaa", "r000003-cccccccc"])
def test_pending_is_cleared_by_itself_alone(tmp_path: Path, other: str) -> None:
    releases.clear_pending(tmp_path, other)
    releases.set_pending(tmp_path, "r000002-bbbbbbbb")
    releases.clear_pending(tmp_path, other)
    assert releases.pending_release(tmp_path) == "r000002-bbbbbbbb"
    releases.clear_pending(tmp_path, "r000002-bbbbbbbb")
    assert releases.pending_release(tmp_path) is None


def test_prune_spares_served_pending_and_pinned(tmp_path: Path) -> None:
    ids = [put(tmp_path, f"r{number:06d}-00000000") for number in range(1, 8)]
    releases.set_current(tmp_path, ids[0])
    releases.set_pending(tmp_path, ids[1])
    releases.pin(tmp_path, ids[2])
    assert releases.prune(tmp_path, keep=2) == [ids[3], ids[4]]
    assert releases.release_ids(tmp_path) == [*ids[:3], *ids[5:]]
    releases.unpin(tmp_path, ids[2])
    assert releases.prune(tmp_path, keep=0) == [ids[2], ids[5], ids[6]]
    with pytest.raises(ReleaseError, match="keep"):
        releases.prune(tmp_path, keep=-1)


def test_prune_ends_what_a_killed_one_began(tmp_path: Path) -> None:
    ids = [put(tmp_path, f"r{number:06d}-00000000") for number in range(1, 4)]
    half = tmp_path / f".unfinished-{ids[0]}"
    (tmp_path / ids[0]).rename(half)
    assert releases.prune(tmp_path, keep=2) == []
    assert not half.exists() and releases.release_ids(tmp_path) == ids[1:]


def test_only_a_release_can_be_pinned_and_only_a_pinned_one_unpinned(tmp_path: Path) -> None:
    release_id = put(tmp_path, "r000001-00000000")
    assert releases.pinned_releases(tmp_path) == []
    with pytest.raises(ReleaseError, match="no release"):
        releases.pin(tmp_path, "r000002-00000000")
    with pytest.raises(ReleaseError, match="not pinned"):
        releases.unpin(tmp_path, release_id)
    releases.pin(tmp_path, release_id)
    releases.pin(tmp_path, release_id)
    assert releases.pinned_releases(tmp_path) == [release_id]


def test_prune_keeps_all_where_there_are_fewer_than_it_keeps(tmp_path: Path) -> None:
    ids = [put(tmp_path, f"r{number:06d}-00000000") for number in range(1, 4)]
    assert releases.prune(tmp_path, keep=5) == []
    assert releases.release_ids(tmp_path) == ids


def test_a_number_is_never_given_twice(tmp_path: Path) -> None:
    assert releases.next_number(tmp_path) == 1
    put(tmp_path, "r000007-00000000")
    assert releases.next_number(tmp_path) == 8
    releases.prune(tmp_path, keep=0)
    assert releases.next_number(tmp_path) == 9
    (tmp_path / "counter").unlink()
    put(tmp_path, "r000020-00000000")
    assert releases.next_number(tmp_path) == 21


def test_leftovers_are_swept_unless_a_publisher_is_at_work(tmp_path: Path) -> None:
    put(tmp_path, "r000001-00000000")
    (tmp_path / ".unfinished-1").mkdir()
    (tmp_path / ".unfinished-1" / "model.safetensors").write_bytes(b"half")
    os.symlink("r000001-00000000", tmp_path / ".unfinished-2")
    os.symlink("r000001-00000000", tmp_path / ".replacing-1")
    os.utime(tmp_path / ".replacing-1", (0, 0), follow_symlinks=False)
    (tmp_path / ".replacing-2").write_text("r000001-00000000\n")
    with releases.release_lock(tmp_path):
        assert releases.sweep(tmp_path) == []
    assert releases.sweep(tmp_path) == [".replacing-1", ".unfinished-1", ".unfinished-2"]
    assert (tmp_path / ".replacing-2").exists()
    assert releases.release_ids(tmp_path) == ["r000001-00000000"]
