"""The command `hf` where it sends no files: discussions, repositories and Spaces."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.hub_fixtures import RunningHub, running_hub
from tests.uploads_fixtures import Repo

pytestmark = pytest.mark.slow
DATASET = ("--repo-type", "dataset")


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningHub]:
    with running_hub(tmp_path_factory.mktemp("hub")) as hub:
        yield hub


def listed(repo: Repo, *arguments: str) -> Any:
    return json.loads(repo.hf(*arguments, "--format", "json"))


def test_discussions(hub: RunningHub, tmp_path: Path) -> None:
    repo = Repo(hub, "talk", tmp_path)
    repo.hf("discussions", "create", repo.id, "--title", "A bug", "--body", "In row 3.", *DATASET)
    repo.hf("discussions", "comment", repo.id, "1", "--body", "Row 4 too.", *DATASET)
    [told] = listed(repo, "discussions", "list", repo.id, *DATASET)
    assert (told["num"], told["title"], told["status"]) == (1, "A bug", "open")
    repo.hf("discussions", "close", repo.id, "1", "--yes", *DATASET)
    shown = repo.hf("discussions", "info", repo.id, "1", *DATASET)
    assert "A bug" in shown and "closed" in shown


def test_repositories(hub: RunningHub, tmp_path: Path) -> None:
    repo = Repo(hub, "old", tmp_path)
    repo.hf("repos", "move", repo.id, "local/new", *DATASET)
    repo.hf("repos", "create", "local/made", *DATASET)
    told = {each["id"] for each in listed(repo, "datasets", "ls", "--author", "local")}
    assert {"local/new", "local/made"} <= told and repo.id not in told
    repo.hf("repos", "delete", "local/made", "--yes", *DATASET)
    assert not hub.api.repo_exists("local/made", repo_type="dataset")
