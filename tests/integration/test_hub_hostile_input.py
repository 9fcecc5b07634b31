"""What a client with a good token may send to harm the hub: long, deep, odd and slow to match."""

import json
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from pipeline.hub import contents
from pipeline.hub.commits import attributes_files
from pipeline.hub.contents import read_tree
from pipeline.hub.git import git
from pipeline.hub.repositories import Repository, RepositoryName
from tests.hub_fixtures import RunningHub, running_hub


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
    return {"key": "file", "value": {"path": path, "content": content}}


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


def fsck(hub: RunningHub, name: str) -> str:
    folder = hub.folder(name)
    done = subprocess.run(
        ["git", f"--git-dir={folder}", "fsck", "--strict", "--no-dangling"],
        capture_output=True,
        text=True,
    )
    return done.stdout + done.stderr


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


def test_the_attributes_of_very_many_folders_are_read_in_seconds(tmp_path: Path) -> None:
    name = RepositoryName(type="dataset", owner="local", name="facts")
    repository = Repository(id="1", name=name, created_at=0, folder=tmp_path)

    def made(*arguments: str, stdin: str = "") -> str:
        roles, fields = ("AUTHOR", "COMMITTER"), ("NAME", "EMAIL")
        extra = {f"GIT_{role}_{field}": "ada" for role in roles for field in fields}
        return git(tmp_path, *arguments, stdin=stdin.encode(), extra=extra).decode().strip()

    git(tmp_path, "init", "-q", "--bare")
    blob = made("hash-object", "-w", "--stdin", stdin="*.big filter=lfs\n")
    folder = made("mktree", stdin=f"100644 blob {blob}\t.gitattributes\n")
    root = made("mktree", stdin="".join(f"040000 tree {folder}\t{n}\n" for n in range(40_000)))
    head = made("commit-tree", root, "-m", "many")
    paths = [f"{n}/a.big" for n in range(40_000)]
    started = time.monotonic()
    found = attributes_files(read_tree(repository, head))
    tracked = contents.large_file_paths(repository, found, paths)
    assert tracked == set(paths)
    # When git read the root again for each folder, this took more than a minute.
    assert time.monotonic() - started < 20


def test_many_deletions_take_no_longer_than_many_additions(hub: RunningHub, name: str) -> None:
    paths = [f"folder/{number}" for number in range(20_000)]
    deletions = [{"key": "deletedFile", "value": {"path": path}} for path in paths]
    started = time.monotonic()
    answer = commit(hub, name, *map(file, paths), *deletions, file("last.txt"))
    assert answer.status_code == 200, answer.text
    assert time.monotonic() - started < 15
    assert hub.api.list_repo_files(name, repo_type="dataset") == [".gitattributes", "last.txt"]


def test_a_token_reaches_no_repository_that_took_the_name_while_the_body_came(
    hub: RunningHub, name: str
) -> None:
    created = hub.request(
        "POST",
        f"/api/settings/tokens/{name.partition('/')[2]}",
        params={"role": "write", "repositories": f"dataset:{name}"},
    )
    token = created.json()["token"]

    header = {"key": "header", "value": {"summary": "Change"}}
    body = "\n".join(json.dumps(line) for line in (header, file("a.txt"))).encode()
    head = (
        f"POST /api/datasets/{name}/commit/main HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        f"Authorization: Bearer {token}\r\nContent-Length: {len(body)}\r\n"
        "Expect: 100-continue\r\nConnection: close\r\n\r\n"
    )
    url = httpx.URL(hub.url)
    with socket.create_connection((url.host, url.port or 80), timeout=30) as connection:
        connection.sendall(head.encode())
        # The hub asks for the body only after it has found the repository.
        assert connection.recv(1024).startswith(b"HTTP/1.1 100")
        hub.api.delete_repo(name, repo_type="dataset")
        hub.api.create_repo(name, repo_type="dataset")
        connection.sendall(body)
        with connection.makefile("rb") as answer:
            found = answer.read().decode()
    assert found.startswith("HTTP/1.1 404")
    assert "does not reach it" in found
    assert len(hub.api.list_repo_commits(name, repo_type="dataset")) == 1


def test_a_body_with_very_many_faults_is_answered(hub: RunningHub, name: str) -> None:
    answer = hub.request(
        "POST", f"/api/datasets/{name}/preupload/main", json={"files": [{}] * 9000}
    )
    assert is_refused(answer, "and 17990 more")
    long = commit(hub, name, *(file("a" * 200 + str(number)) for number in range(3)), file("../x"))
    assert is_refused(long, "not a path of a file")


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
    assert fsck(hub, name) == ""


def test_files_may_have_names_that_git_reads_as_magic(hub: RunningHub, name: str) -> None:
    paths = [":!a.txt", ":(top)b.tmp", "./c.txt"[2:]]
    answer = preupload(hub, name, *paths, gitIgnore="*.tmp\n").json()
    assert [each["shouldIgnore"] for each in answer["files"]] == [False, True, False]
    assert commit(hub, name, *map(file, paths)).status_code == 200


def test_a_tag_is_no_branch(hub: RunningHub, name: str) -> None:
    hub.api.create_tag(name, tag="v1", repo_type="dataset")
    hub.api.create_tag(name, tag="v2", tag_message="The second", repo_type="dataset")
    before = hub.api.list_repo_refs(name, repo_type="dataset").tags
    for tag in ("v1", "v2"):
        for query in ("", "?create_pr=1"):
            answer = commit(hub, name, file("a.txt"), to=f"refs%2Ftags%2F{tag}{query}")
            assert is_refused(answer, "no branch", 404)
    assert hub.api.list_repo_refs(name, repo_type="dataset").tags == before


@pytest.mark.parametrize(
    "path, content, reason",
    [
        (".gitmodules", '[submodule "a"]\nurl = https://x\n', "by a push with git"),
        ("a/.GITMODULES", "", "by a push with git"),
        ("a\\gitmod~1", "", "by a push with git"),
    ],
)
def test_what_git_checks_in_a_push_is_refused_in_a_commit(
    hub: RunningHub, name: str, path: str, content: str, reason: str
) -> None:
    assert is_refused(commit(hub, name, file("b.txt"), file(path, content)), reason)
    assert hub.api.list_repo_files(name, repo_type="dataset") == [".gitattributes"]
    assert fsck(hub, name) == ""


def test_a_file_that_no_clone_can_check_out_is_refused_and_may_be_deleted(
    hub: RunningHub, name: str
) -> None:
    """Git reads a backslash as on Windows, on every system."""
    path = r"a\.git\x"
    assert is_refused(commit(hub, name, file(path)), "git's own folder")
    assert is_refused(preupload(hub, name, path), "git's own folder")
    older_hub = b"""commit refs/heads/main
committer hub <hub@localhost> 0 +0000
data 0
from refs/heads/main^0
M 100644 inline "a\\\\.git\\\\x"
data 0
"""
    folder = hub.folder(name)
    git = ["git", f"--git-dir={folder}"]
    subprocess.run([*git, "fast-import", "--quiet"], input=older_hub, check=True)
    assert path in hub.api.list_repo_files(name, repo_type="dataset")
    deletion = {"key": "deletedFile", "value": {"path": path}}
    assert commit(hub, name, deletion).status_code == 200
    assert hub.api.list_repo_files(name, repo_type="dataset") == [".gitattributes"]
