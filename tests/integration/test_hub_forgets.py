"""What `pipeline hub gc` removes, and what a running hub forgets by itself from time to time."""

import os
from pathlib import Path

from sqlalchemy import delete

from pipeline.hub import database as tables
from pipeline.hub.large_files import LargeFiles
from serving.weights import release_store
from tests.hub_fixtures import commit_file, push_file, running_hub, stopped_hub, wait_until
from tests.integration.test_hub_purge import Place, place, pushed

__all__ = ["place", "pushed"]


def test_the_hub_forgets_old_events_and_a_collection_the_commits_that_only_they_named(
    tmp_path: Path,
) -> None:
    needed: set[str] = set()
    with running_hub(
        tmp_path / "hub",
        needed_commits=lambda: needed,
        keep_deliveries_days=1e-9,
        reconcile_seconds=0.05,
    ) as hub:
        work = tmp_path / "clone"
        hub.git("clone", "-q", hub.create_dataset("local/facts"), str(work), cwd=tmp_path)
        first, needless = (push_file(hub, work, "a.txt", text) for text in ("one", "two"))
        needed.add(push_file(hub, work, "a.txt", "three"))
        needed.add(commit_file(hub, work, "a.txt", "four"))
        hub.git("push", "-q", "origin", "HEAD:side", cwd=work)
        hub.git("push", "-q", "--force", "origin", f"{first}:main", ":side", cwd=work)
        hub.git("checkout", "-q", "--orphan", "other", cwd=work)
        lost = commit_file(hub, work, "a.txt", "five")
        hub.git("push", "-q", "origin", "HEAD:side", cwd=work)
        hub.git("push", "-q", "origin", ":side", cwd=work)

        def released() -> int:
            return int(hub.request("POST", "/api/settings/gc").json()["released"])

        wait_until(lambda: released() == 1)
        for sha, is_there in ((lost, False), (needless, True), *((one, True) for one in needed)):
            assert hub.api.revision_exists("local/facts", sha, repo_type="dataset") == is_there


def test_gc_removes_what_nothing_needs(place: Place) -> None:
    with place.hub() as hub:
        place.push_away(hub)
    files = LargeFiles(place.folder)
    oid = files.store([bytes(2_000_000)], None, 2_000_000)
    os.utime(files.path(oid), (0, 0))
    said = place.pipeline("gc").stdout
    assert "removed 0 commits that nothing needs" in said
    assert "removed 2.0 MB of large files that no commit names" in said
    assert place.has(place.after), "an event names it"
    with stopped_hub(place.home.hub_dir) as hub, hub.database.write() as connection:
        connection.execute(delete(tables.events))  # as the hub does when they are old
    needed = place.release(1, place.bad)
    # The release needs a commit that only the ref of a later one leads to.
    said = place.pipeline("gc").stdout
    assert "removed 1 commits that nothing needs" in said and "large files" not in said
    assert (place.has(place.bad), place.has(place.after)) == (True, False)
    release_store.remove(place.home.releases_dir / "facts", needed)
    with place.hub(needed_commits=set):
        assert "removed 1 commits that nothing needs" in place.pipeline("gc").stdout
    assert not place.has(place.bad) and place.has(place.good)
