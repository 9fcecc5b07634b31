"""What a client with a good token may send to harm the hub: long, deep, odd and slow to match."""

import json
from base64 import b64encode
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from pipeline.hub import contents
from tests.hub_fixtures import RunningHub, run_git, running_hub


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningHub]:
    with running_hub(tmp_path_factory.mktemp("hostile") / "hub", reconcile_seconds=3600) as hub:
        yield hub


@pytest.fixture
def name(hub: RunningHub, request: pytest.FixtureRequest) -> str:
    """A dataset of this test alone."""
    name = f"local/d{abs(hash(request.node.name))}"
    hub.api.create_repo(name, repo_type="dataset")
    return name


def file(path: str, content: str = "x") -> dict[str, Any]:
    encoded = b64encode(content.encode()).decode()
    return {"key": "file", "value": {"path": path, "content": encoded}}


def commit(
    hub: RunningHub,
    name: str,
    *operations: dict[str, Any],
    summary: str = "Change",
    to: str = "main",
) -> httpx.Response:
    lines = [{"key": "header", "value": {"summary": summary}}, *operations]
    body = "\n".join(json.dumps(line) for line in lines)
    return hub.request("POST", f"/api/datasets/{name}/commit/{to}", content=body)


def preupload(hub: RunningHub, name: str, *paths: str, **body: str) -> httpx.Response:
    files = [{"path": path, "size": 1} for path in paths]
    return hub.request(
        "POST", f"/api/datasets/{name}/preupload/main", json={"files": files, **body}
    )


def is_refused(answer: httpx.Response, reason: str, status: int = 400) -> bool:
    assert (answer.status_code, reason in answer.json()["error"]) == (status, True), answer.text
    return True


def test_a_pattern_that_git_never_finishes_is_refused(
    hub: RunningHub, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contents, "_MATCHING_SECONDS", 0.5)
    path, pattern = "a" * 200 + "c", "*a" * 12 + "b"
    assert is_refused(preupload(hub, name, path, gitIgnore=f"{pattern}\n"), ".gitignore")
    lines = file(".gitattributes", f"{pattern} filter=lfs\n")
    assert commit(hub, name, lines).status_code == 200
    assert is_refused(preupload(hub, name, path), ".gitattributes")
    assert commit(hub, name, file("b.txt")).status_code == 200


def test_folders_that_are_nested_by_thousands_take_no_memory(hub: RunningHub, name: str) -> None:
    deep = [f"{n}/" + "y/" * 90 + "f" for n in range(4)]
    paths = [f"{n}/" + "x/" * 1950 + "f" for n in range(200)]
    assert is_refused(preupload(hub, name, *paths), "nest the folders less deeply")
    assert is_refused(commit(hub, name, *map(file, paths)), "nest the folders less deeply")
    assert commit(hub, name, *map(file, deep)).status_code == 200


def test_texts_that_git_cannot_store_are_refused(hub: RunningHub, name: str) -> None:
    half = {"key": "file", "value": {"path": "a.txt", "content": "\ud800"}}
    assert is_refused(commit(hub, name, half), "Invalid JSON")
    assert is_refused(commit(hub, name, file("\ud800.txt")), "Invalid JSON")
    assert is_refused(commit(hub, name, file("a.txt"), summary="a\0b"), "summary")
    for path, body in (
        ("discussions", {"title": "a\0b", "description": "It", "pullRequest": True}),
        ("tag/main", {"tag": "v1", "message": "a\0b"}),
    ):
        answer = hub.request("POST", f"/api/datasets/{name}/{path}", json=body)
        assert answer.status_code == 400, answer.text
    hub.git("fsck", "--strict", cwd=hub.folder(name))


def test_a_tag_is_no_branch(hub: RunningHub, name: str) -> None:
    hub.api.create_tag(name, tag="v1", repo_type="dataset")
    hub.api.create_tag(name, tag="v2", tag_message="The second", repo_type="dataset")
    before = hub.api.list_repo_refs(name, repo_type="dataset").tags
    for tag in ("v1", "v2"):
        for query in ("", "?create_pr=1"):
            answer = commit(hub, name, file("a.txt"), to=f"refs%2Ftags%2F{tag}{query}")
            assert is_refused(answer, "no branch", 404)
    assert hub.api.list_repo_refs(name, repo_type="dataset").tags == before


def test_a_file_that_no_clone_can_check_out_is_refused_and_may_be_deleted(
    hub: RunningHub, name: str
) -> None:
    """Git reads a backslash as on Windows, on every system."""
    path = r"a\.git\x"
    assert is_refused(commit(hub, name, file(path)), "git's own folder")
    assert is_refused(preupload(hub, name, path), "git's own folder")
    older_hub = """commit refs/heads/main
committer hub <hub@localhost> 0 +0000
data 0
from refs/heads/main^0
M 100644 inline "a\\\\.git\\\\x"
data 0
"""
    run_git("fast-import", "--quiet", cwd=hub.folder(name), env=hub.git_env, stdin=older_hub)
    assert path in hub.api.list_repo_files(name, repo_type="dataset")
    deletion = {"key": "deletedFile", "value": {"path": path}}
    assert commit(hub, name, deletion).status_code == 200
    assert hub.api.list_repo_files(name, repo_type="dataset") == [".gitattributes"]
