"""What each kind of token may do: the hub's own, for reading, for writing. That without one nothing
may be read: property/test_hub_routes.py."""

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError

from pipeline.errors import PipelineError
from pipeline.tokens import load_tokens, tokens_of_hub
from tests.hub_fixtures import RunningHub, commit_file, push_file, running_hub

DATASET: dict[str, Any] = {"repo_type": "dataset"}
CHANGES: list[Callable[[HfApi], object]] = [
    lambda api: api.create_repo("local/new", **DATASET),
    lambda api: api.delete_repo("local/facts", **DATASET),
    lambda api: api.move_repo("local/facts", "local/moved", **DATASET),
    lambda api: api.create_branch("local/facts", branch="b", **DATASET),
    lambda api: api.create_tag("local/facts", tag="t", **DATASET),
    lambda api: api.delete_tag("local/facts", tag="t", **DATASET),
    lambda api: api.delete_file("rows.txt", "local/facts", **DATASET),
    lambda api: api.upload_file(
        path_or_fileobj=b"x", path_in_repo="x", repo_id="local/facts", **DATASET
    ),
]


def test_another_machine_starts_nothing_with_tokens_that_the_hub_does_not_know(
    hub: RunningHub, tmp_path: Path
) -> None:
    file = tmp_path / "tokens.json"
    tokens = load_tokens(file)
    with pytest.raises(PipelineError, match="copy this file from the hub's machine"):
        tokens_of_hub(file, hub.url)
    assert tokens_of_hub(file, "http://127.0.0.1:9") == tokens, "the hub is away"
    file.write_text(tokens.model_copy(update={"hub": hub.token}).model_dump_json())
    assert tokens_of_hub(file, hub.url).hub == hub.token


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningHub]:
    """With `local/facts` and `local/shown`, both of one file."""
    root = tmp_path_factory.mktemp("hub")
    with running_hub(root / "hub") as hub:
        for name in ("facts", "shown"):
            hub.api.create_repo(f"local/{name}", private=False, **DATASET)
            url = f"{hub.url}/datasets/local/{name}"
            hub.git("clone", "-q", url, name, cwd=root)
            push_file(hub, root / name, "rows.txt", name)
        yield hub


def made(hub: RunningHub, name: str, **query: str) -> str:
    answer = hub.request("POST", f"/api/settings/tokens/{name}", params=query)
    answer.raise_for_status()
    token: str = answer.json()["token"]
    return token


def status(hub: RunningHub, method: str, path: str, token: str | None = None) -> int:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    return httpx.request(method, f"{hub.url}{path}", headers=headers).status_code


def as_(hub: RunningHub, token: str) -> RunningHub:
    return replace(hub, token=token)


def test_a_token_to_read_reads_and_changes_nothing(hub: RunningHub, tmp_path: Path) -> None:
    reader = as_(hub, made(hub, "reader", role="read"))
    me = reader.api.whoami()
    assert (me["name"], me["auth"]["accessToken"]["role"]) == ("local", "read")
    assert me["auth"]["accessToken"]["displayName"] == "reader"
    assert reader.api.dataset_info("local/facts").id == "local/facts"
    assert reader.api.get_paths_info("local/facts", ["rows.txt"], **DATASET)
    assert reader.api.list_repo_files("facts", **DATASET)
    file = reader.api.hf_hub_download("local/facts", "rows.txt", cache_dir=tmp_path, **DATASET)
    assert Path(file).read_text() == "facts"
    for change in CHANGES:
        with pytest.raises(HfHubHTTPError) as refused:
            change(reader.api)
        assert refused.value.response.status_code == 403
    for method, path in [
        ("POST", "/api/settings/webhooks"),
        ("POST", "/api/datasets/local/facts/commit/main/paths-info/x"),
        ("GET", "/api/datasets/local/facts/xet-write-token/main"),
        ("GET", "/api/settings/tokens"),
        ("POST", "/api/settings/tokens/mine"),
        ("POST", "/api/settings/gc"),
    ]:
        assert status(hub, method, path, reader.token) == 403, path

    reader.git("clone", "-q", f"{hub.url}/datasets/local/facts", "copy", cwd=tmp_path)
    commit_file(reader, tmp_path / "copy", "rows.txt", "changed")
    said = reader.git("push", cwd=tmp_path / "copy", check=False)
    assert "403" in said, said
    assert hub.request("GET", "/datasets/local/facts/resolve/main/rows.txt").text == "facts"


def test_large_files_are_read_and_written_as_the_token_says(
    hub: RunningHub, tmp_path: Path
) -> None:
    hub.api.create_repo("local/large", **DATASET)
    reader = as_(hub, made(hub, "large-reader", role="read"))
    writer = as_(hub, made(hub, "large-writer", role="write"))
    content = b"\0rows" * 1000
    writer.api.upload_file(
        path_or_fileobj=content, path_in_repo="rows.parquet", repo_id="local/large", **DATASET
    )
    file = reader.api.hf_hub_download("local/large", "rows.parquet", cache_dir=tmp_path, **DATASET)
    assert Path(file).read_bytes() == content
    objects = [{"oid": sha256(content).hexdigest(), "size": len(content)}]
    for one, operation, status in [
        (reader, "download", 200),
        (reader, "upload", 403),
        (writer, "upload", 200),
    ]:
        answer = one.request(
            "POST",
            "/datasets/local/large.git/info/lfs/objects/batch",
            json={"operation": operation, "objects": objects},
        )
        assert answer.status_code == status, operation


def test_a_token_to_write_changes_repositories_and_makes_no_tokens(
    hub: RunningHub, tmp_path: Path
) -> None:
    writer = as_(hub, made(hub, "writer", role="write"))
    writer.api.create_repo("local/written", **DATASET)
    writer.git("clone", "-q", f"{hub.url}/datasets/local/written", "copy", cwd=tmp_path)
    push_file(writer, tmp_path / "copy", "rows.txt", "1")
    assert writer.api.list_webhooks() == []
    writer.api.delete_repo("local/written", **DATASET)
    for method, path in [
        ("GET", "/api/settings/tokens"),
        ("POST", "/api/settings/tokens/more"),
        ("DELETE", "/api/settings/tokens/writer"),
        ("POST", "/api/settings/gc"),
        ("POST", f"/api/settings/purge/datasets/local/facts/{'0' * 40}"),
    ]:
        assert status(hub, method, path, writer.token) == 403, path


def test_a_revoked_token_is_refused_and_no_token_is_stored(hub: RunningHub) -> None:
    token = made(hub, "brief", role="read")
    assert status(hub, "GET", "/api/datasets/local/facts", token) == 200
    assert token not in str(hub.request("GET", "/api/settings/tokens").json())
    with closing(sqlite3.connect(hub.root / "hub.sqlite")) as database:
        assert token not in "\n".join(database.iterdump())
    assert hub.request("DELETE", "/api/settings/tokens/brief").status_code == 200
    assert status(hub, "GET", "/api/datasets/local/facts", token) == 401
    assert hub.request("DELETE", "/api/settings/tokens/brief").status_code == 404
    for wrong in (f"{token}x", token[:-1], token.upper(), "hf_", "x" * 10_000):
        assert status(hub, "GET", "/api/datasets/local/shown", wrong) == 401
