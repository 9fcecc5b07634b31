"""What a running hub forgets by itself from time to time."""

from pathlib import Path

import pytest

from tests.hub_fixtures import commit_file, running_hub, wait_until


def test_the_hub_forgets_old_events_and_then_the_commits_that_only_they_named(
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
        hub.git("push", "-q", "--force", "origin", f"{first}:main", cwd=work)
        of_a_release = commit_file(hub, work, "a.txt", "three")
        needed.add(of_a_release)
        hub.git("push", "-q", "--force", "origin", "HEAD:main", cwd=work)
        hub.git("push", "-q", "--force", "origin", f"{first}:main", cwd=work)
        repository = hub.root / "repos/datasets/local/facts.git"
        refs = ("for-each-ref", "--format=%(refname)", "refs/keep")
        kept = f"refs/keep/{of_a_release}"
        wait_until(lambda: hub.git(*refs, cwd=repository) == kept)
        assert needless not in hub.git("for-each-ref", cwd=repository)
