"""A hub whose disk is full refuses what it cannot store, says so, and takes it once there is
room."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.disk_fixtures import fill, small_disk
from tests.hub_fixtures import RunningHub, running_hub
from tests.integration.test_hub_hostile_input import commit, file
from tests.integration.test_hub_large_file_faults import signed


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk") as disk:
        yield disk


@pytest.fixture
def hub(disk: Path) -> Iterator[RunningHub]:
    with running_hub(disk / "hub", reconcile_seconds=3600) as hub:
        yield hub


def test_what_finds_no_room_is_answered_507_and_leaves_nothing(hub: RunningHub, disk: Path) -> None:
    hub.api.create_repo("local/facts", repo_type="dataset")
    opened = commit(hub, "local/facts", file("pr.txt"), to="main?create_pr=1")
    assert opened.status_code == 200
    talk = {"title": "Full", "description": "words " * 500}
    discussions = "/api/datasets/local/facts/discussions"
    changes: list[Callable[[], httpx.Response]] = [
        lambda: commit(hub, "local/facts", file("a.txt")),
        lambda: commit(hub, "local/facts", file("b.txt", os.urandom(100_000).hex())),
        lambda: hub.request("POST", f"{discussions}/1/merge", json={}),
        lambda: hub.request("POST", discussions, json=talk),
    ]
    refused = 0
    for leave in (0, 4096, 16384, 260_000):
        for change in changes[:2] if leave > 100_000 else changes:
            fill(disk, leave=leave)
            answer = change()
            assert answer.status_code in (200, 507), answer.text
            refused += answer.status_code == 507
    assert refused >= 10
    packs = hub.folder("local/facts") / "objects/pack"
    assert list(packs.glob("tmp_*")) == []

    (disk / "filler").unlink()
    for change in changes:
        assert change().status_code == 200
    files = set(hub.api.list_repo_files("local/facts", repo_type="dataset"))
    assert files == {".gitattributes", "a.txt", "b.txt", "pr.txt"}


def test_a_large_file_that_finds_no_room_is_answered_507_and_leaves_nothing(
    hub: RunningHub, disk: Path
) -> None:
    hub.create_dataset("local/facts")
    content = os.urandom(300_000)
    url = signed(hub, "upload", content)
    fill(disk, leave=4096)
    refused = httpx.put(url, content=content, timeout=60)
    assert (refused.status_code, "make room" in refused.json()["error"]) == (507, True)
    assert not [each for each in (hub.root / "repos").rglob("lfs/**/*") if each.is_file()]
    (disk / "filler").unlink()
    assert httpx.put(url, content=content, timeout=60).status_code == 200


def test_a_token_reads_although_the_disk_is_full(hub: RunningHub, disk: Path) -> None:
    hub.api.create_repo("local/facts", repo_type="dataset")
    token = hub.request("POST", "/api/settings/tokens/reader").json()["token"]
    fill(disk, leave=0)
    headers = {"Authorization": f"Bearer {token}"}
    path = "/datasets/local/facts/resolve/main/.gitattributes"
    assert hub.request("GET", path, headers=headers).status_code == 200
