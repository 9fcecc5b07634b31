"""Discussions and pull requests by the unmodified `huggingface_hub` client."""

import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationDelete,
    DiscussionWithDetails,
    WebhookPayload,
)
from huggingface_hub.errors import BadRequestError, HfHubHTTPError
from starlette.requests import Request

from pipeline.hub import service
from pipeline.hub.errors import Conflict
from pipeline.hub.git import git
from pipeline.hub.routes import discussions
from tests.hub_fixtures import (
    Receiver,
    RunningHub,
    commit_file,
    running_hub,
)
from tests.uploads_fixtures import Repo

pytest_plugins = ["tests.hub_plugin"]


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningHub]:
    with running_hub(tmp_path_factory.mktemp("hub")) as hub:
        yield hub
        hub.fsck()


class Talk(Repo):
    """A new dataset whose discussions a webhook is told of."""

    def __init__(self, hub: RunningHub, receiver: Receiver, name: str, scratch: Path) -> None:
        super().__init__(hub, name, scratch)
        self.api.upload_file(path_or_fileobj=b"1\n2\n3\n", path_in_repo="a.txt", **self.on)
        self._receiver = receiver
        self.api.create_webhook(
            url=receiver.url,
            watched=[{"type": "dataset", "name": self.id}],
            domains=["discussion"],
        )

    def details(self, num: int) -> DiscussionWithDetails:
        return self.api.get_discussion_details(discussion_num=num, **self.on)

    def told(self, count: int) -> list[WebhookPayload]:
        bodies = [one.json for one in self._receiver.wait_for(count)]
        assert len(bodies) == count
        assert not any("headSha" in one["repo"] for one in bodies)
        return [WebhookPayload(**one) for one in bodies]

    def clone_of_first_pull_request(self) -> Path:
        clone = self.scratch / "clone"
        self.hub.git("clone", "-q", f"{self.hub.url}/{self.path}", str(clone), cwd=self.scratch)
        self.hub.git("fetch", "-q", "origin", "refs/pr/1:pr/1", cwd=clone)
        self.hub.git("checkout", "-q", "pr/1", cwd=clone)
        return clone


@pytest.fixture
def talk(
    hub: RunningHub, receiver: Receiver, request: pytest.FixtureRequest, tmp_path: Path
) -> Talk:
    return Talk(hub, receiver, request.node.name.replace("_", "-"), tmp_path)


def test_a_discussion_from_its_first_comment_to_its_end(talk: Talk) -> None:
    api, on = talk.api, talk.on
    made = api.create_discussion(title=" A  question ", description="Why *so*?", **on)
    assert (made.num, made.title, made.status, made.author) == (1, "A  question", "open", "local")
    api.comment_discussion(discussion_num=1, comment="Because.", **on)
    closed = api.change_discussion_status(
        discussion_num=1, new_status="closed", comment="Done.", **on
    )
    assert closed.new_status == "closed"
    details = talk.details(1)
    assert (details.title, details.status, details.is_pull_request) == (
        "A  question",
        "closed",
        False,
    )
    assert [event.type for event in details.events] == [
        "comment",
        "comment",
        "comment",
        "status-change",
    ]
    with pytest.raises(HfHubHTTPError, match="is closed already"):
        api.change_discussion_status(discussion_num=1, new_status="closed", **on)

    told = talk.told(4)
    assert [
        (one.event.action, one.event.scope, one.comment and one.comment.content) for one in told
    ] == [
        ("create", "discussion", "Why *so*?"),
        ("create", "discussion.comment", "Because."),
        ("create", "discussion.comment", "Done."),
        ("update", "discussion", None),
    ]
    talks = [one.discussion for one in told if one.discussion is not None]
    assert [one.status for one in talks] == ["open", "open", "open", "closed"]


@pytest.mark.slow
def test_hf_without_files(talk: Talk) -> None:
    dataset = ("--repo-type", "dataset")
    talk.hf("discussions", "create", talk.id, "--title", "A bug", "--body", "In row 3.", *dataset)
    talk.hf("discussions", "comment", talk.id, "1", "--body", "Row 4 too.", *dataset)
    talk.hf("discussions", "close", talk.id, "1", "--yes", *dataset)
    shown = talk.hf("discussions", "info", talk.id, "1", *dataset)
    assert "A bug" in shown and "closed" in shown
    talk.hf("repos", "create", "local/made", *dataset)
    talk.hf("repos", "move", "local/made", "local/moved", *dataset)
    listed = talk.hf("datasets", "ls", "--format", "json")
    assert "local/moved" in listed and "local/made" not in listed
    talk.hf("repos", "delete", "local/moved", "--yes", *dataset)
    assert not talk.api.repo_exists("local/moved", repo_type="dataset")


def test_a_title_may_have_characters_that_are_not_printed(hub: RunningHub) -> None:
    # Joined ones, as in emoji and Persian, and one that no Unicode has yet.
    title = "The \U0001f469\u200d\U0001f52c: \u0645\u06cc\u200c\u0631\u0648\u0645 \U0001fbff"
    on: dict[str, Any] = {"repo_id": "local/titles", "repo_type": "dataset"}
    hub.api.create_repo(**on)
    made = hub.api.create_discussion(title=title, **on)
    assert made.title == title
    commit = hub.api.upload_file(
        path_or_fileobj=b"x",
        path_in_repo=f"{made.num}.txt",
        commit_message=title,
        create_pr=True,
        **on,
    )
    assert commit.pr_num is not None
    hub.api.merge_pull_request(discussion_num=commit.pr_num, **on)
    assert hub.api.list_repo_commits(**on)[0].title == f"{title} (#{commit.pr_num})"


def test_discussions_are_listed_by_kind_and_status(talk: Talk) -> None:
    api, on = talk.api, talk.on
    for number in range(55):
        api.create_discussion(title=f"Question {number}", **on)
    api.create_pull_request(title="Change", **on)
    api.change_discussion_status(discussion_num=1, new_status="closed", **on)
    assert [one.num for one in api.get_repo_discussions(**on)] == list(range(56, 0, -1))
    for options, expected in [
        ({"discussion_type": "pull_request"}, [56]),
        ({"discussion_status": "closed"}, [1]),
        ({"discussion_status": "open", "discussion_type": "discussion"}, [*range(55, 1, -1)]),
        ({"author": "nobody"}, []),
    ]:
        assert [one.num for one in api.get_repo_discussions(**on, **options)] == expected
    answer = talk.hub.request("GET", f"/api/datasets/{talk.id}/discussions?type=issue")
    assert (answer.status_code, "query.type" in answer.json()["error"]) == (400, True)


def test_a_pull_request_from_its_draft_to_its_merge(talk: Talk) -> None:
    api, on, hub = talk.api, talk.on, talk.hub
    made = api.create_pull_request(title="Better rows", description="See.", **on)
    assert (made.status, made.target_branch, made.git_reference) == (
        "draft",
        "refs/heads/main",
        "refs/pr/1",
    )
    api.upload_file(path_or_fileobj=b"b\n", path_in_repo="b.txt", revision="refs/pr/1", **on)
    api.change_discussion_status(discussion_num=1, new_status="open", **on)
    clone = talk.clone_of_first_pull_request()
    (clone / "a.txt").write_text("1\n2\n3\n4\n")
    hub.git("commit", "-qam", "A fourth row", cwd=clone)
    hub.git("push", "-q", "origin", "pr/1:refs/pr/1", cwd=clone)
    assert "hidden ref" in hub.git("push", "origin", "pr/1:refs/pr/7", cwd=clone, check=False)
    # Meanwhile main goes on.
    api.upload_file(path_or_fileobj=b"c\n", path_in_repo="c.txt", **on)

    details = talk.details(1)
    assert details.diff is not None
    assert "+4" in details.diff and "c.txt" not in details.diff
    refs = api.list_repo_refs(talk.id, repo_type="dataset", include_pull_requests=True)
    assert [one.ref for one in refs.pull_requests or []] == ["refs/pr/1"]

    api.merge_pull_request(discussion_num=1, comment="Thanks.", **on)
    merged = talk.details(1)
    [newest, before, *_] = api.list_repo_commits(talk.id, repo_type="dataset")
    assert (merged.status, merged.merge_commit_oid) == ("merged", newest.commit_id)
    assert newest.title == "Better rows (#1)" and "A fourth row" in newest.message
    assert before.title == "Upload c.txt with huggingface_hub"
    assert (talk.read("a.txt"), talk.read("b.txt"), talk.read("c.txt")) == (
        b"1\n2\n3\n4\n",
        b"b\n",
        b"c\n",
    )
    with pytest.raises(HfHubHTTPError, match="merged already"):
        api.merge_pull_request(discussion_num=1, **on)
    with pytest.raises(HfHubHTTPError, match="is merged"):
        api.upload_file(path_or_fileobj=b"d", path_in_repo="d", revision="refs/pr/1", **on)
    assert "hidden ref" in hub.git("push", "origin", "main:refs/pr/1", cwd=clone, check=False)
    told = talk.told(4)
    assert told[-2].comment is not None and told[-2].comment.content == "Thanks."
    assert told[-1].discussion is not None
    assert told[-1].discussion.changes is not None
    assert told[-1].discussion.changes.mergeCommitId == newest.commit_id


def test_each_kind_of_upload_opens_a_pull_request(talk: Talk, tmp_path: Path) -> None:
    api, on = talk.api, talk.on
    api.upload_file(path_or_fileobj=b"b", path_in_repo="folder/b.txt", **on)
    head = api.dataset_info(talk.id).sha
    (tmp_path / "x.txt").write_text("x\n")
    made = [
        api.upload_file(path_or_fileobj=b"x", path_in_repo="x.txt", create_pr=True, **on),
        api.upload_folder(folder_path=tmp_path, create_pr=True, **on),
        api.create_commit(
            operations=[CommitOperationAdd("y", b"y"), CommitOperationDelete("a.txt")],
            commit_message="Two changes",
            commit_description="At once",
            create_pr=True,
            parent_commit=head,
            **on,
        ),
        api.delete_file(path_in_repo="a.txt", create_pr=True, **on),
        api.delete_folder(path_in_repo="folder", create_pr=True, **on),
        api.delete_files(delete_patterns=["a.*"], create_pr=True, **on),
    ]
    assert [one.pr_num for one in made] == [1, 2, 3, 4, 5, 6]
    assert made[0].pr_url == f"{talk.hub.url}/datasets/{talk.id}/discussions/1"
    assert api.dataset_info(talk.id).sha == head
    for one in made:
        assert one.pr_revision is not None
        assert api.dataset_info(talk.id, revision=one.pr_revision).sha == one.oid
    assert talk.details(3).title == "Two changes"
    assert talk.details(3).status == "open"


def test_a_push_that_waits_for_a_merge_is_refused(
    talk: Talk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its commits would be in no branch."""
    api, on, hub = talk.api, talk.on, talk.hub
    api.upload_file(path_or_fileobj=b"x", path_in_repo="x.txt", create_pr=True, **on)
    clone = talk.clone_of_first_pull_request()
    commit_file(hub, clone, "late.txt", "late")
    squash, chunks = discussions.squash, service.chunks
    has_come = threading.Event()
    pushes = ThreadPoolExecutor(1)
    told: list[Future[str]] = []

    async def received(request: Request, **options: Any) -> AsyncIterator[bytes]:
        async for chunk in chunks(request, **options):
            yield chunk
        if request.method == "POST":
            has_come.set()

    def slow(*arguments: Any, **options: Any) -> str:
        refs = ("push", "origin", "pr/1:refs/pr/1")
        told.append(pushes.submit(hub.git, *refs, cwd=clone, check=False))
        assert has_come.wait(60)
        return squash(*arguments, **options)

    monkeypatch.setattr(service, "chunks", received)
    monkeypatch.setattr(discussions, "squash", slow)
    with pushes:
        api.merge_pull_request(discussion_num=1, **on)
        assert "hidden ref" in told[0].result()
    assert talk.details(1).status == "merged"


def test_what_both_sides_changed_is_named_and_not_merged(talk: Talk) -> None:
    api, on = talk.api, talk.on
    api.upload_file(path_or_fileobj=b"one\n2\n3\n", path_in_repo="a.txt", create_pr=True, **on)
    api.upload_file(path_or_fileobj=b"eins\n2\n3\n", path_in_repo="a.txt", **on)
    head = api.dataset_info(talk.id).sha
    with pytest.raises(HfHubHTTPError, match=r"both sides changed a\.txt"):
        api.merge_pull_request(discussion_num=1, **on)
    assert api.dataset_info(talk.id).sha == head
    assert talk.details(1).status == "open"


def test_a_pull_request_without_a_common_commit_is_shown_and_not_merged(
    talk: Talk, tmp_path: Path
) -> None:
    api, on, hub = talk.api, talk.on, talk.hub
    api.upload_file(path_or_fileobj=b"x\n", path_in_repo="x.txt", create_pr=True, **on)
    hub.git("init", "-q", "other", cwd=tmp_path)
    commit_file(hub, tmp_path / "other", "a.txt", "another beginning")
    url = f"{hub.url}/datasets/{talk.id}"
    hub.git("push", "-q", "--force", url, "main", cwd=tmp_path / "other")
    details = talk.details(1)
    assert details.diff is not None and "no commit in common" in details.diff
    with pytest.raises(HfHubHTTPError, match="unrelated histories") as refused:
        api.merge_pull_request(discussion_num=1, **on)
    assert refused.value.response.status_code == 409
    assert talk.details(1).status == "open"


def killed(folder: Path, *arguments: str, **options: Any) -> bytes:
    """As git, but moves no ref."""
    if arguments[0] == "update-ref":
        raise Conflict("killed")
    return git(folder, *arguments, **options)


def test_a_merge_that_fails_changes_nothing(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    api, on = talk.api, talk.on
    api.upload_file(path_or_fileobj=b"x\n", path_in_repo="x.txt", create_pr=True, **on)
    head, before = api.dataset_info(talk.id).sha, talk.details(1)

    with monkeypatch.context() as patch:
        patch.setattr(discussions, "git", killed)
        with pytest.raises(HfHubHTTPError, match="killed"):
            api.merge_pull_request(discussion_num=1, comment="Good.", **on)
    assert api.dataset_info(talk.id).sha == head
    assert talk.details(1) == before
    api.merge_pull_request(discussion_num=1, comment="Good.", **on)
    assert talk.details(1).status == "merged"
    assert talk.read("x.txt") == b"x\n"


@pytest.mark.parametrize(
    "path, body, status",
    [
        ("", {"title": "", "description": "x"}, 400),
        ("", {"title": "x" * 300, "description": "x"}, 400),
        ("", {"title": "x\x07", "description": "x"}, 400),
        ("", {"title": "x", "description": " "}, 400),
        ("/1/comment", {"comment": "x" * 100_000}, 400),
        ("/1/status", {"status": "merged"}, 400),
        ("/1/merge", None, 400),
        ("/9/comment", {"comment": "x"}, 404),
        ("/1/none", {}, 501),
    ],
)
def test_bad_requests_are_refused(hub: RunningHub, path: str, body: Any, status: int) -> None:
    hub.api.create_repo("local/bad", repo_type="dataset", exist_ok=True)
    if not list(hub.api.get_repo_discussions("local/bad", repo_type="dataset")):
        hub.api.create_discussion("local/bad", "First", repo_type="dataset")
    answer = hub.request("POST", f"/api/datasets/local/bad/discussions{path}", json=body)
    assert answer.status_code == status, answer.text
    assert len(list(hub.api.get_repo_discussions("local/bad", repo_type="dataset"))) == 1


def test_a_pull_request_that_is_refused_leaves_no_ref(talk: Talk) -> None:
    """A ref without a discussion could not be deleted by anybody."""
    too_long = "x" * (discussions.MAX_TEXT + 1)
    with pytest.raises(BadRequestError, match="description: String should have at most"):
        talk.api.create_pull_request(title="A", description=too_long, **talk.on)
    refs = talk.api.list_repo_refs(talk.id, repo_type="dataset", include_pull_requests=True)
    assert refs.pull_requests == []
    assert talk.api.create_pull_request(title="A", **talk.on).num == 1


def test_a_pull_request_whose_ref_was_not_made_can_be_read_and_closed(
    talk: Talk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a kill between the discussion and its ref."""
    with monkeypatch.context() as patch:
        patch.setattr(discussions, "git", killed)
        with pytest.raises(HfHubHTTPError, match="killed"):
            talk.api.create_pull_request(title="A", **talk.on)
    assert talk.api.create_pull_request(title="B", **talk.on).num == 2
    assert "may have no commit" in (talk.details(1).diff or "")
    with pytest.raises(HfHubHTTPError, match="open another one"):
        talk.api.merge_pull_request(discussion_num=1, **talk.on)
    talk.api.change_discussion_status(discussion_num=1, new_status="closed", **talk.on)
    assert talk.details(1).status == "closed"


def test_a_pull_request_needs_a_commit_to_start_from(hub: RunningHub) -> None:
    hub.create_dataset("local/empty")
    with pytest.raises(BadRequestError, match="has no commit"):
        hub.api.create_pull_request("local/empty", "Change", repo_type="dataset")
    assert not list(hub.api.get_repo_discussions("local/empty", repo_type="dataset"))
