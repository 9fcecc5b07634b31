"""`gc` and `purge` remove the large files that nothing names any more, and no other."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.formats import Pointer
from pipeline.hub.large_files import LargeFiles
from pipeline.hub.xet import XetStore
from tests.hub_fixtures import RunningHub, commit_file, running_hub


class Place:
    """A hub, which has stopped, and what was pushed to it."""

    def __init__(self, root: Path, hub: RunningHub) -> None:
        self.root, self.hub = root / "hub", hub
        self.work = root / "work"
        hub.git("clone", "-q", hub.create_dataset("local/facts"), str(self.work), cwd=root)
        self.files = LargeFiles(hub.folder("local/facts"))

    def push(self, name: str, content: bytes, *options: str) -> str:
        """A commit of a large file. The sha."""
        oid = self.store(content)
        pointer = Pointer(oid=oid, size=len(content)).render().decode()
        sha = commit_file(self.hub, self.work, name, pointer)
        self.hub.git("push", "-q", *options, "origin", "HEAD:main", cwd=self.work)
        return sha

    def store(self, content: bytes) -> str:
        oid = self.files.store([content], None, len(content))
        long_ago = time.time() - 7200
        os.utime(self.files.path(oid), (long_ago, long_ago))
        return oid

    def contents(self) -> set[bytes]:
        return {self.files.path(oid).read_bytes() for oid in self.files.oids()}


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with running_hub(tmp_path / "hub", reconcile_seconds=3600) as hub:
        yield Place(tmp_path, hub)


def test_gc_keeps_what_a_commit_names_and_what_has_just_come(place: Place) -> None:
    place.push("a.bin", b"first")
    place.push("a.bin", b"second")
    place.store(b"nobody's")
    place.files.store([b"just come"], None, 9)
    store = XetStore.current(place.files.incoming.parents[1])
    answer = place.hub.request("POST", "/api/settings/gc").json()
    assert answer == {"released": 0, "large_bytes": len(b"nobody's")}
    assert place.contents() == {b"first", b"second", b"just come"}
    assert XetStore.current(place.files.incoming.parents[1]).id == store.id


def test_a_file_that_is_asked_for_again_is_kept_until_its_commit_comes(place: Place) -> None:
    oid = place.store(b"dataset")
    batch = "/datasets/local/facts.git/info/lfs/objects/batch"
    wanted = {"operation": "upload", "objects": [{"oid": oid, "size": 7}]}
    [told] = place.hub.request("POST", batch, json=wanted).json()["objects"]
    assert "actions" not in told, "it is here"
    place.hub.request("POST", "/api/settings/gc")
    assert place.contents() == {b"dataset"}


def test_purge_removes_the_files_that_only_the_purged_commits_name(place: Place) -> None:
    good = place.push("a.bin", b"good")
    bad = place.push("a.bin", b"secret")
    place.push("b.bin", b"good")  # after it, with a file that stays
    place.push("c.bin", b"after")
    place.hub.git("reset", "-q", "--hard", good, cwd=place.work)
    place.push("d.bin", b"kept", "--force")
    waiting = place.files.store([b"its commit comes yet"], None, 20)
    folder = place.files.incoming.parents[1]
    store = XetStore.current(folder)
    before = place.contents()
    assert {b"secret", b"after"} < before
    answer = place.hub.request("POST", f"/api/settings/purge/datasets/local/facts/{bad}")
    assert answer.status_code == 200
    assert place.contents() == before - {b"secret", b"after"}
    assert place.files.size(waiting) == 20
    assert XetStore.current(folder).id != store.id, "xorbs hold what was purged"
