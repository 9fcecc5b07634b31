"""Commits by the unmodified `huggingface_hub` client, one repository of one hub for each test."""

import json
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from huggingface_hub import (
    CommitOperation,
    CommitOperationAdd,
    CommitOperationCopy,
    CommitOperationDelete,
)
from huggingface_hub.errors import (
    BadRequestError,
    EntryNotFoundError,
    HfHubHTTPError,
    RevisionNotFoundError,
)

from tests.hub_fixtures import (
    Receiver,
    RunningHub,
    push_file,
    running_hub,
)
from tests.uploads_fixtures import Repo

pytest_plugins = ["tests.hub_plugin"]


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningHub]:
    with running_hub(tmp_path_factory.mktemp("hub")) as hub:
        yield hub
        hub.fsck()


class Dataset(Repo):
    def commit(self, *operations: CommitOperation, **options: str) -> str:
        message = options.pop("commit_message", "Change")
        made = self.api.create_commit(
            operations=list(operations), commit_message=message, **self.on, **options
        )
        assert made.oid
        return made.oid

    def files(self, revision: str = "main") -> dict[str, bytes]:
        return {path: self.read(path, revision) for path in self.paths(revision)}

    def watch(self, receiver: Receiver) -> str:
        """The id of a new webhook."""
        watched = [{"type": "dataset", "name": self.id}]
        return self.api.create_webhook(url=receiver.url, watched=watched).id

    def titles(self) -> list[str]:
        return [one.title for one in self.api.list_repo_commits(**self.on)]

    def clone(self) -> Path:
        folder = self.scratch / "clone"
        self.hub.git("clone", "-q", f"{self.hub.url}/{self.path}", str(folder), cwd=self.scratch)
        return folder

    def check_refs(self) -> None:
        """No ref is left that a commit needed while it was made."""
        refs = subprocess.check_output(
            ["git", f"--git-dir={self.folder}", "for-each-ref", "--format=%(refname)"], text=True
        )
        assert all(ref.startswith(("refs/heads/", "refs/tags/")) for ref in refs.split())


@pytest.fixture
def dataset(hub: RunningHub, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Dataset]:
    name = "".join(letter if letter.isalnum() else "-" for letter in request.node.name)
    dataset = Dataset(hub, name.replace("--", "-").strip("-")[:90], tmp_path)
    yield dataset
    dataset.check_refs()


def add(path: str, content: bytes = b"1\n") -> CommitOperationAdd:
    return CommitOperationAdd(path, content)


def test_a_new_repository_has_a_first_commit(dataset: Dataset) -> None:
    assert dataset.titles() == ["initial commit"]
    assert b"*.parquet filter=lfs diff=lfs merge=lfs -text\n" in dataset.read(".gitattributes")
    dataset.hub.api.create_branch(dataset.id, branch="side", repo_type="dataset")
    dataset.hub.api.create_tag(dataset.id, tag="v0", repo_type="dataset")


def test_files_are_added_changed_deleted_and_copied_in_one_commit(dataset: Dataset) -> None:
    dataset.commit(add("a.txt"), add("old/b.txt"), add("old/c.txt"), add('q"u\\o te/ü.txt', b""))
    made = dataset.hub.api.create_commit(
        dataset.id,
        [
            CommitOperationDelete("old/"),
            CommitOperationCopy("a.txt", "new/copy.txt"),
            add("a.txt", b"2\n"),
            add("old", b"a file now\n"),
        ],
        repo_type="dataset",
        commit_message="Tidy",
        commit_description="Two\nlines",
    )
    assert dataset.files() == {
        "a.txt": b"2\n",
        "new/copy.txt": b"1\n",
        "old": b"a file now\n",
        'q"u\\o te/ü.txt': b"",
    }
    [newest, *_] = dataset.hub.api.list_repo_commits(dataset.id, repo_type="dataset")
    assert (newest.commit_id, newest.title, newest.message) == (made.oid, "Tidy", "Two\nlines")
    assert newest.authors == ["local"]
    assert made.commit_url == f"{dataset.hub.url}/datasets/{dataset.id}/commit/{made.oid}"


def test_a_folder_whose_files_are_deleted_leaves_its_name_to_a_file(dataset: Dataset) -> None:
    dataset.commit(add("old/a.txt"), add("old/sub/b.txt"), add("other/c.txt"))
    both = [CommitOperationDelete("old/a.txt"), CommitOperationDelete("old/sub/b.txt")]
    with pytest.raises(BadRequestError, match="it is a folder"):
        dataset.commit(both[0], add("old", b"a file now\n"))
    with pytest.raises(EntryNotFoundError, match="doesn't exist"):
        dataset.commit(*both, CommitOperationDelete("old/"))
    dataset.commit(*both, add("old", b"a file now\n"))
    assert dataset.files() == {"old": b"a file now\n", "other/c.txt": b"1\n"}
    dataset.commit(CommitOperationDelete("old"), add("old/sub/d.txt"))
    assert dataset.files() == {"old/sub/d.txt": b"1\n", "other/c.txt": b"1\n"}


def test_a_commit_goes_on_top_of_a_push_and_a_push_on_top_of_it(dataset: Dataset) -> None:
    hub, clone = dataset.hub, dataset.clone()
    push_file(hub, clone, "pushed.txt", "by git\n")
    dataset.commit(add("sent.txt"), commit_message="Sent")
    hub.git("pull", "-q", cwd=clone)
    push_file(hub, clone, "sent.txt", "changed by git\n")
    by_git = ["Change sent.txt", "Change pushed.txt"]
    assert dataset.titles() == [by_git[0], "Sent", by_git[1], "initial commit"]
    assert dataset.files() == {"pushed.txt": b"by git\n", "sent.txt": b"changed by git\n"}


def test_a_commit_for_another_parent_is_refused(dataset: Dataset) -> None:
    before = dataset.head
    after = dataset.commit(add("a.txt"), parent_commit=before[:7])
    with pytest.raises(HfHubHTTPError, match="The branch was updated since you opened") as refused:
        dataset.commit(add("b.txt"), parent_commit=before)
    assert refused.value.response.status_code == 412
    assert dataset.head == after


def test_what_changes_nothing_makes_no_commit(dataset: Dataset, receiver: Receiver) -> None:
    webhook = dataset.watch(receiver)
    first = dataset.commit(add("a.txt"))
    body = (
        b'{"key": "header", "value": {"summary": "Again"}}\n'
        b'{"key": "file", "value": {"path": "a.txt", "content": "MQo="}}\n'
    )
    answer = dataset.hub.request("POST", f"/api/datasets/{dataset.id}/commit/main", content=body)
    assert answer.json()["commitOid"] == first
    header = body.splitlines()[0]
    answer = dataset.hub.request("POST", f"/api/datasets/{dataset.id}/commit/main", content=header)
    assert answer.json()["commitOid"] == first
    assert len(dataset.hub.deliveries(webhook)) == 1


@pytest.mark.parametrize(
    "operation, error, reason",
    [
        (CommitOperationDelete("none.txt"), EntryNotFoundError, "doesn't exist"),
        (CommitOperationDelete("folder"), EntryNotFoundError, "trailing '/'"),
        (CommitOperationDelete("a.txt/"), EntryNotFoundError, "doesn't exist"),
        (add("a.txt/b.txt"), BadRequestError, "'a.txt' is a file"),
        (add("folder"), BadRequestError, "it is a folder"),
        (add("x/.gIt\u200c./config"), BadRequestError, "git's own folder"),
        (add("a\nb"), BadRequestError, "a control character"),
        (add("x" * 5000), BadRequestError, "4000 bytes"),
    ],
)
def test_a_change_that_the_tree_cannot_take_is_refused(
    dataset: Dataset, operation: CommitOperation, error: type[Exception], reason: str
) -> None:
    before = dataset.commit(add("a.txt"), add("folder/b.txt"))
    with pytest.raises(error, match=reason):
        dataset.commit(add("first.txt"), operation)
    assert dataset.head == before


def test_a_folder_that_the_same_commit_puts_over_a_file_is_not_there_to_delete(
    dataset: Dataset,
) -> None:
    before = dataset.commit(add("a"))
    with (
        pytest.raises(EntryNotFoundError, match="doesn't exist"),
        pytest.warns(UserWarning, match="delete a folder"),
    ):
        dataset.commit(add("a/b.txt"), CommitOperationDelete("a/"))
    assert dataset.head == before


@pytest.mark.parametrize(
    "body, reason",
    [
        (b"", "first line"),
        (b"no json", "must be JSON"),
        (b'{"key": "header", "value": {"summary": ""}}', "summary"),
        (b'{"key": "header", "value": {"summary": "x"}}\n{"key": "boom", "value": 1}', "'file'"),
        (
            b'{"key": "header", "value": {"summary": "x"}}\n'
            b'{"key": "file", "value": {"path": "a", "content": "%%", "encoding": "base64"}}',
            "base64 data",
        ),
        (
            b'{"key": "header", "value": {"summary": "x"}}\n'
            b'{"key": "lfsFile", "value": {"path": "a", "oid": "%s"}}' % (b"a" * 64),
            "upload the file before",
        ),
        (b"[" * 100_000, "must be JSON"),
    ],
)
def test_a_body_that_is_no_commit_is_refused(hub: RunningHub, body: bytes, reason: str) -> None:
    hub.api.create_repo("local/bodies", repo_type="dataset", exist_ok=True)
    answer = hub.request("POST", "/api/datasets/local/bodies/commit/main", content=body)
    assert (answer.status_code, reason in answer.json()["error"]) == (400, True), answer.text
    assert len(hub.api.list_repo_commits("local/bodies", repo_type="dataset")) == 1


def test_commits_go_to_branches_only(dataset: Dataset) -> None:
    dataset.hub.api.create_branch(dataset.id, branch="side/one", repo_type="dataset")
    dataset.commit(add("a.txt"), revision="side/one")
    assert (dataset.files(), set(dataset.files("side/one"))) == ({}, {"a.txt"})
    for revision in ("none", dataset.head):
        with pytest.raises(RevisionNotFoundError):
            dataset.commit(add("b.txt"), revision=revision)


def test_gitignore_leaves_files_out(dataset: Dataset, tmp_path: Path) -> None:
    for name in ("keep.txt", "b.log", "tmp/c.txt", "!odd.log"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    dataset.commit(add(".gitignore", b"*.log\ntmp/\n!b.log\n"))
    dataset.hub.api.upload_folder(folder_path=tmp_path, repo_id=dataset.id, repo_type="dataset")
    assert set(dataset.files()) == {".gitignore", "b.log", "keep.txt"}


def test_a_changed_file_stays_executable(dataset: Dataset) -> None:
    hub, clone = dataset.hub, dataset.clone()
    (clone / "run.sh").touch(0o755)
    push_file(hub, clone, "run.sh", "true\n")
    dataset.commit(add("run.sh", b"false\n"), add("a.txt"))
    hub.git("pull", "-q", cwd=clone)
    assert (clone / "run.sh").read_text() == "false\n"
    assert (clone / "run.sh").stat().st_mode & 0o111
    assert not (clone / "a.txt").stat().st_mode & 0o111


def test_a_file_takes_the_place_of_a_submodule(dataset: Dataset) -> None:
    hub, clone = dataset.hub, dataset.clone()
    entry = f"160000,{'a' * 40},sub"
    hub.git("update-index", "--add", "--cacheinfo", entry, cwd=clone)
    hub.git("commit", "-qm", "Submodules", cwd=clone)
    hub.git("push", "-q", "origin", "main", cwd=clone)
    dataset.api.upload_file(path_or_fileobj=b"1\n", path_in_repo="sub", **dataset.on)
    assert dataset.files() == {"sub": b"1\n"}


def test_twenty_clients_write_at_once_and_each_commit_is_one_event(
    dataset: Dataset, receiver: Receiver
) -> None:
    dataset.watch(receiver)
    start = dataset.head
    with ThreadPoolExecutor(20) as clients:
        shas = list(clients.map(lambda number: dataset.commit(add(f"{number}.txt")), range(20)))
    assert len(dataset.files()) == 20

    told = [
        (ref["oldSha"], ref["newSha"])
        for one in receiver.wait_for(20)
        for ref in one.json["updatedRefs"]
    ]
    following = dict(told)
    chain = [start]
    while (after := following.get(chain[-1])) is not None:
        chain.append(after)
    assert sorted(chain[1:]) == sorted(shas)
    assert len(told) == 20


def test_ten_thousand_files_are_one_commit(dataset: Dataset) -> None:
    """The client would ask 40 times which of them are large before it sends the same body."""
    files = [
        {"path": f"{number // 100}/{number}.txt", "content": f"{number:08}"}  # base64
        for number in range(10_000)
    ]
    lines = [{"key": "header", "value": {"summary": "Many"}}]
    lines += [{"key": "file", "value": each} for each in files]
    body = "\n".join(map(json.dumps, lines))
    before, url = dataset.head, f"/api/datasets/{dataset.id}/commit/main"
    made = dataset.hub.request("POST", url, content=body).raise_for_status().json()["commitOid"]
    git = ["git", f"--git-dir={dataset.folder}"]
    since = subprocess.check_output([*git, "rev-list", f"{before}..main"], text=True).split()
    assert since == [made]
    assert len(dataset.paths()) == 10_000
