"""Repositories as the Hub's client finds, lists, moves and describes them."""

import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

from pipeline.hub.contents import Card
from pipeline.hub.routes import commits
from tests.hub_fixtures import RunningHub, push_file, running_hub

DATASET: dict[str, Any] = {"repo_type": "dataset"}


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningHub]:
    with running_hub(tmp_path_factory.mktemp("hub"), owner="Ada") as hub:
        yield hub
        hub.fsck()


def pushed(hub: RunningHub, id: str, folder: Path, **files: str) -> str:
    """A new dataset with one commit; its sha."""
    owner, _, _ = id.partition("/")
    hub.request(
        "POST",
        "/api/repos/create",
        json={"name": id.split("/")[1], "organization": owner, "type": "dataset", "empty": True},
    ).raise_for_status()
    hub.git("init", "-q", str(folder), cwd=folder.parent)
    hub.git("remote", "add", "origin", f"{hub.url}/datasets/{id}", cwd=folder)
    for name, content in files.items():
        sha = push_file(hub, folder, name.replace("_", "."), content)
    return sha


def test_a_name_without_owner_is_the_hubs_owners_on_every_route(
    hub: RunningHub, tmp_path: Path
) -> None:
    sha = pushed(hub, "Ada/plain", tmp_path / "plain", rows_txt="1")
    api = hub.api
    assert api.dataset_info("plain").id == "Ada/plain"
    assert api.dataset_info("plain", revision=sha).sha == sha
    assert api.list_repo_files("plain", **DATASET) == ["rows.txt"]
    assert api.list_repo_commits("plain", **DATASET)[0].commit_id == sha
    assert api.get_paths_info("plain", "rows.txt", **DATASET)[0].path == "rows.txt"
    file = api.hf_hub_download("plain", "rows.txt", cache_dir=tmp_path / "cache", **DATASET)
    assert Path(file).read_text() == "1"
    api.create_branch("plain", branch="side", **DATASET)
    api.delete_branch("plain", branch="side", **DATASET)
    assert [ref.name for ref in api.list_repo_refs("plain", **DATASET).branches] == ["main"]
    hub.git("clone", "-q", f"{hub.url}/datasets/plain", "copy", cwd=tmp_path)
    push_file(hub, tmp_path / "copy", "rows.txt", "2")
    api.upload_file(
        path_or_fileobj=b"\0" * 5000, path_in_repo="large.bin", repo_id="plain", **DATASET
    )
    asked = {"operation": "upload", "objects": []}
    assert hub.request("POST", "/datasets/plain.git/info/lfs/objects/batch", json=asked).is_success
    assert api.create_discussion("plain", title="Why?", **DATASET).num == 1
    api.delete_repo("plain", **DATASET)
    assert not api.repo_exists("Ada/plain", **DATASET)


@pytest.mark.parametrize("name", ["tree", "resolve", "info", "settings"])
def test_a_repository_may_be_called_like_a_part_of_a_route(
    hub: RunningHub, tmp_path: Path, name: str
) -> None:
    pushed(hub, f"Ada/{name}", tmp_path / "odd", rows_txt="1")
    for id in (f"Ada/{name}", name):
        assert hub.api.dataset_info(id, revision="main").id == f"Ada/{name}"
        assert hub.api.list_repo_files(id, **DATASET) == ["rows.txt"]
        assert hub.api.list_repo_refs(id, **DATASET).branches
        assert hub.api.file_exists(id, "rows.txt", **DATASET)
        hub.git("clone", "-q", f"{hub.url}/datasets/{id}", id.replace("/", "-"), cwd=tmp_path)
    hub.api.delete_repo(f"Ada/{name}", **DATASET)


@pytest.mark.parametrize("name", ["tree", "refs"])
def test_a_repository_that_is_called_like_a_part_of_a_route_may_be_missing(
    hub: RunningHub, name: str
) -> None:
    id = f"Ada/{name}"
    assert not hub.api.repo_exists(id, **DATASET)
    assert not hub.api.file_exists(id, "rows.txt", **DATASET)
    for act in (
        lambda: hub.api.list_repo_files(id, **DATASET),
        lambda: hub.api.list_repo_refs(id, **DATASET),
        lambda: hub.api.upload_file(
            path_or_fileobj=b"1", path_in_repo="rows.txt", repo_id=id, **DATASET
        ),
    ):
        with pytest.raises(RepositoryNotFoundError):
            act()


@pytest.mark.parametrize("id", ["datasets/x", "Spaces/x", "api/x", "settings/x", "Ada/refs"])
def test_a_repository_that_could_never_be_reached_is_refused(hub: RunningHub, id: str) -> None:
    owner, _, name = id.partition("/")
    body = {"name": name, "organization": owner, "type": "model"}
    answer = hub.request("POST", "/api/repos/create", json=body)
    assert answer.status_code == 400
    assert "nobody could reach the repository" in answer.json()["error"]


def test_names_are_compared_without_case(hub: RunningHub, tmp_path: Path) -> None:
    api = hub.api
    sha = pushed(hub, "Ada/Facts", tmp_path / "facts", rows_txt="1")
    assert api.dataset_info("aDA/fACTS").id == "Ada/Facts"
    assert api.file_exists("ada/facts", "rows.txt", **DATASET)
    hub.git("clone", "-q", f"{hub.url}/datasets/ada/facts", "copy", cwd=tmp_path)
    with pytest.raises(HfHubHTTPError, match="a dataset Ada/Facts here already"):
        api.create_repo("ada/FACTS", **DATASET)
    api.create_repo("Team/Other", **DATASET)
    assert [one.id for one in api.list_datasets(author="TEAM")] == ["Team/Other"]
    with pytest.raises(HfHubHTTPError, match="a dataset Ada/Facts here already"):
        api.move_repo("Team/Other", "ada/facts", **DATASET)
    api.move_repo("Ada/Facts", "Ada/facts", **DATASET)
    assert (api.dataset_info("Ada/FACTS").id, api.dataset_info("Ada/FACTS").sha) == (
        "Ada/facts",
        sha,
    )


def test_who_moves_a_repository_is_told_which_webhooks_stay_behind(hub: RunningHub) -> None:
    api = hub.api
    api.create_repo("Ada/watched", **DATASET)
    ids = [
        api.create_webhook(url="http://127.0.0.1:9/", watched=[{"type": type, "name": name}]).id
        for type, name in [("dataset", "ada/WATCHED"), ("model", "Ada/watched"), ("user", "Ada")]
    ]
    body = {"fromRepo": "Ada/watched", "toRepo": "Team/left", "type": "dataset"}
    told = hub.request("POST", "/api/repos/move", json=body).headers["X-HF-Warning"]
    assert 'needs dataset = "Team/left"' in told
    assert ids[0] in told and ids[1] not in told and ids[2] not in told
    assert [one.name for one in api.get_webhook(ids[0]).watched] == ["ada/WATCHED"]
    assert not api.repo_exists("Ada/watched", **DATASET)
    for id in ids:
        api.delete_webhook(id)


def test_what_is_missing_does_not_exist(hub: RunningHub, tmp_path: Path) -> None:
    api = hub.api
    pushed(hub, "Ada/there", tmp_path / "there", rows_txt="1")
    assert api.repo_exists("Ada/there", **DATASET)
    assert api.revision_exists("Ada/there", "main", **DATASET)
    assert api.file_exists("Ada/there", "rows.txt", **DATASET)
    for id, type in [("Ada/none", "dataset"), ("none", "dataset"), ("Ada/there", "model")]:
        assert not api.repo_exists(id, repo_type=type)
        assert not api.revision_exists(id, "main", repo_type=type)
        assert not api.file_exists(id, "rows.txt", repo_type=type)
    for revision in (
        "none",
        "0" * 40,
        "main~1",
        "a b",
        "refs/pr/1",
        "@{1}",
        "-x",
        "a..b",
        "x.lock",
    ):
        assert not api.revision_exists("Ada/there", revision, **DATASET)
        assert not api.file_exists("Ada/there", "rows.txt", revision=revision, **DATASET)
    for path in ("none", "a/b", "../x", "rows.txt/x", "a//b", "a\nb", "é", "x" * 5000, "a\0b"):
        assert not api.file_exists("Ada/there", path, **DATASET)


def test_readmes_are_validated(hub: RunningHub) -> None:
    def validate(content: str) -> httpx.Response:
        body = {"content": content, "repoType": "dataset"}
        return hub.request("POST", "/api/validate-yaml", json=body)

    labels = "".join(f"- label-{number}\n" for number in range(10_000))
    for right in ("---\nlicense: mit\n---\n# Facts", "# Facts", f"---\nlabels:\n{labels}---\n"):
        assert validate(right).json() == {"errors": [], "warnings": []}
    for content, reason in [
        ("---\nlicense: mit\ntags: [a\nx: y\n---\n", "line 4"),
        ("---\n- a\n- b\n---\n", "must be a mapping"),
        ("---\na: &a [x]\nb: *a\n---\n", "aliases"),
        (f"---\na: {'[' * 40_000}\n---\n", "recursion"),
        ("---\na: !!python/object:os.system {}\n---\n", "could not determine a constructor"),
        ("---\na: !!int x\n---\n", "no YAML"),
    ]:
        answer = validate(content)
        assert answer.status_code == 400, content[:100]
        assert reason in answer.json()["errors"][0]["message"]
    hub.api._validate_yaml("---\nlicense: mit\n---\n" + "x" * 2**21, repo_type="dataset")
    with pytest.raises(ValueError, match="must be a mapping"):
        hub.api._validate_yaml("---\n- tags\n---\n", repo_type="dataset")


def test_readmes_are_checked_one_at_a_time(
    hub: RunningHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each may take seconds of the hub's time, and nobody needs a token for it."""
    now, most = 0, 0

    def slow(_: str) -> Card:
        nonlocal now, most
        now += 1
        most = max(most, now)
        time.sleep(0.05)
        now -= 1
        return Card()

    def check(_: int) -> int:
        url = f"{hub.url}/api/validate-yaml"
        return httpx.post(url, json={"content": ""}, verify=False, timeout=60).status_code

    monkeypatch.setattr(commits, "parse_card", slow)
    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(check, range(4))) == {200}
    assert most == 1


PUSH_A_CARD = """
from huggingface_hub import DatasetCard, metadata_update
DatasetCard("---\\nlicense: mit\\n---\\n# Facts").push_to_hub("Ada/card")
metadata_update("Ada/card", {"tags": ["a"]}, repo_type="dataset")
other = {"repo_type": "dataset", "overwrite": True, "create_pr": True}
metadata_update("Ada/card", {"tags": ["a", "b"]}, **other)
DatasetCard("---\\na: &a [x]\\nb: *a\\n---\\n").validate(repo_type="dataset")
"""


def test_cards_are_pushed_though_the_client_checks_them_without_a_token(
    hub: RunningHub, tmp_path: Path
) -> None:
    hub.api.create_repo("Ada/card", **DATASET)
    env = {**hub.git_env, "HF_ENDPOINT": hub.url, "HF_TOKEN": hub.token, "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", PUSH_A_CARD], env=env, capture_output=True, text=True, timeout=60
    )
    assert "ValueError" in done.stderr and "aliases" in done.stderr, done.stderr
    for revision, tags in (("main", ["a"]), ("refs/pr/1", ["a", "b"])):
        card = hub.api.dataset_info("Ada/card", revision=revision).card_data
        assert card is not None and card.to_dict() == {"license": "mit", "tags": tags}


def test_lists_are_searched(hub: RunningHub, tmp_path: Path) -> None:
    api = hub.api
    card = "---\nlicense: mit\ntags: [birds]\nday: 2026-13-45\nratio: .nan\n---\n"
    shas = [
        pushed(hub, f"lab/list-{n}", tmp_path / f"{n}", README_md=card if n == 1 else f"# {n}")
        for n in range(3)
    ]
    ids = [f"lab/list-{n}" for n in range(3)]
    api.create_repo("lab/list-model")
    assert [one.id for one in api.list_datasets(author="lab", search="LIST-")] == ids[::-1]
    assert [one.id for one in api.list_models(search="list-")] == ["lab/list-model"]
    assert [one.id for one in api.list_datasets(search="list-", limit=2)] == ids[:0:-1]
    assert [one.id for one in api.list_datasets(dataset_name="list-1", search="LAB/")] == ids[1:2]
    [found] = api.list_datasets(search="list-1", full=True)
    assert (found.sha, found.tags) == (shas[1], ["birds"]) and found.card_data["tags"] == ["birds"]
    assert found.created_at and found.last_modified


MODEL_CARD = """---
pipeline_tag: text-generation
library_name: transformers
tags: [birds]
---
"""


def test_models_are_found_by_the_task_of_their_cards(hub: RunningHub) -> None:
    api = hub.api
    for name in ("card-model", "bare-model"):
        api.create_repo(f"lab/{name}")
    api.upload_file(
        path_or_fileobj=MODEL_CARD.encode(), path_in_repo="README.md", repo_id="lab/card-model"
    )
    [listed] = api.list_models(author="lab", search="card-model")
    for told in (listed, api.model_info("lab/card-model")):
        assert (told.pipeline_tag, told.library_name) == ("text-generation", "transformers")
        assert told.tags == ["birds"]
    assert api.model_info("lab/bare-model").pipeline_tag is None
    assert [one.id for one in api.list_models(pipeline_tag="text-generation")] == ["lab/card-model"]
    assert not list(api.list_models(pipeline_tag="fill-mask"))


def test_what_the_hub_has_and_this_one_has_not_is_told(hub: RunningHub) -> None:
    hub.api.create_repo("Ada/space", repo_type="space", space_sdk="static")
    for act in (
        lambda: list(hub.api.list_collections(owner="Ada")),
        lambda: hub.api.get_space_runtime("Ada/space"),
        lambda: hub.api.get_space_variables("Ada/space"),
        lambda: hub.api.delete_space_secret("Ada/space", "KEY"),
        lambda: list(hub.api.list_datasets(filter="license:mit")),
        lambda: list(hub.api.list_models(sort="downloads")),
        lambda: list(hub.api.list_user_repos()),
        lambda: hub.api.get_space_secrets("Ada/space"),
        lambda: hub.api.super_squash_history("Ada/space", repo_type="space"),
        lambda: hub.api.update_repo_settings("Ada/space", private=False, repo_type="space"),
        lambda: hub.api.add_space_secret("Ada/space", "KEY", "value"),
    ):
        with pytest.raises(HfHubHTTPError, match="not supported by this hub") as refused:
            act()
        assert refused.value.response.status_code == 501
    for path in ("/none", "/oauth/device"):
        answer = hub.request("GET", path)
        assert (answer.status_code, "not supported" in answer.json()["error"]) == (404, True)
