"""What a running hub forgets by itself from time to time."""

from pathlib import Path

import pytest

from tests.hub_fixtures import commit_file, running_hub, wait_until


def test_the_hub_forgets_old_events_and_a_collection_the_commits_that_only_they_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.hub.app.PRUNE_SECONDS", 0.05)
    needed: set[str] = set()
    with running_hub(
        tmp_path / "hub", needed_commits=lambda: needed, keep_deliveries_days=1e-9
    ) as hub:
        work = tmp_path / "clone"
        hub.git("clone", "-q", hub.create_dataset("local/facts"), str(work), cwd=tmp_path)
        first, needless = (commit_file(hub, work, "a.txt", text) for text in ("one", "two"))
        hub.git("push", "-q", "origin", "HEAD:main", cwd=work)
        needed.add(commit_file(hub, work, "a.txt", "three"))
        hub.git("push", "-q", "origin", "HEAD:main", cwd=work)
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
