"""The pages of datasets, releases, webhooks and the playground, on a real hub and a real server."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from tests.console_fixtures import Person, Stack, running_stack
from tests.hub_fixtures import TOKEN, Receiver, wait_until

pytest_plugins = ["tests.hub_plugin"]

DATASET = "/datasets/local/facts"


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    with running_stack(tmp_path) as stack:
        yield stack


@pytest.fixture
def ada(stack: Stack) -> Iterator[Person]:
    with stack.person(TOKEN) as person:
        yield person


def head_of(stack: Stack) -> str:
    return str(stack.hub.api.dataset_info("local/facts").sha)


def file_of(stack: Stack, name: str = "facts.jsonl") -> str:
    return stack.hub.request("GET", f"{DATASET}/resolve/main/{name}").text


def test_a_dataset_shows_its_files_rows_and_what_each_commit_became(
    stack: Stack, ada: Person
) -> None:
    release = stack.releases[0]
    stack.run_job(stack.head, release)
    assert "local/facts" in ada.see("/datasets")
    page = ada.see(DATASET)
    for shown in ("facts.jsonl", "First &lt;rows&gt;", "promoted", release, "<h1>Facts</h1>"):
        assert shown in page
    assert "<script>alert" not in page
    assert 'javascript:1"' not in page
    rows = ada.see(f"{DATASET}/rows")
    for shown in ("2 to train on", "no rows are read from .pdf files", "&lt;b&gt;Ada&lt;/b&gt;"):
        assert shown in rows.replace("2 rows", "2")
    assert ada.see(f"{DATASET}/raw/{stack.head}/facts.jsonl") == file_of(stack)
    ada.see("/datasets/local/none", 404)


def test_rows_are_edited_deleted_and_added_by_a_form_and_shown_as_a_difference_in_rows(
    stack: Stack, ada: Person
) -> None:
    edit = f"{DATASET}/edit"
    assert "At nine." in ada.see(f"{edit}?file=facts.jsonl&line=1")
    fields = {"file": "facts.jsonl", "parent": stack.head, "c.question": "When do you open?"}
    changed = {**fields, "line": "1", "c.answer": "At ten."}
    shown = ada.see(ada.send(edit, data=changed).headers["location"])
    assert "0 added, 1 edited, 0 deleted" in shown
    assert "At nine." in shown
    assert "At ten." in shown
    # The branch has moved: the form is of the commit before.
    refused = ada.send(edit, 412, data={**changed, "c.answer": "At eleven."})
    assert "The branch was updated since you opened this page" in refused.text
    more = {**fields, "parent": head_of(stack), "c.question": "Why?", "c.answer": "So."}
    assert "1 added" in ada.see(ada.send(edit, data=more).headers["location"])
    gone = {"file": "facts.jsonl", "line": "2", "parent": head_of(stack), "delete": "1"}
    assert "1 deleted" in ada.see(ada.send(edit, data=gone).headers["location"])
    rows = [json.loads(line) for line in file_of(stack).splitlines()]
    assert [row["answer"] for row in rows] == ["At ten.", "So."]


def test_an_upload_is_a_commit_and_names_rows_that_no_job_can_read(
    stack: Stack, ada: Person
) -> None:
    upload, data = f"{DATASET}/upload", {"parent": stack.head, "message": "More"}
    bad = {"files": ("more.jsonl", b'{"question": "Q?"}\n')}
    shown = ada.see(ada.send(upload, data=data, files=bad).headers["location"])
    assert "more.jsonl, line 1: nothing to learn" in shown
    assert stack.hub.api.list_repo_commits("local/facts", repo_type="dataset")[0].title == "More"
    ada.send(upload, 412, data=data, files={"files": ("more.jsonl", b"{}")})
    large = {"files": ("weights.bin", b"\0" * 2000)}
    ada.send(upload, data={"parent": head_of(stack)}, files=large)
    [info] = stack.hub.api.get_paths_info("local/facts", ["weights.bin"], repo_type="dataset")
    assert (info.lfs is not None, info.size) == (True, 2000)  # type: ignore[union-attr]


def test_a_wrong_answer_is_corrected_and_asked_again_when_its_release_answers(
    stack: Stack, ada: Person
) -> None:
    asked = {"question": "When do you open?", "mode": "chat", "max_tokens": "8"}
    page = ada.client.post("/playground", data=asked).text
    for shown in (stack.releases[0], stack.head[:8], "At nine.", "% sure", "curl "):
        assert shown in page
    lines = ada.client.post("/playground/stream", data=asked).text.splitlines()
    source, *_ = map(json.loads, lines)
    assert source == {"release": stack.releases[0], "revision": stack.head}
    prompt = ada.client.post("/playground", data={**asked, "mode": "prompt"})
    assert "% sure" in prompt.text

    sent = ada.send("/playground/teach", data={**asked, "right": "At ten."})
    follow = sent.headers["location"]
    [commit] = parse_qs(urlsplit(follow).query)["commit"]
    assert commit == head_of(stack)
    assert [json.loads(line)["answer"] for line in file_of(stack).splitlines()] == [
        "At ten.",
        "<b>Ada</b>",
    ]
    waiting = ada.see(follow)
    assert "no job yet" in waiting
    assert "sse:change" in waiting
    stack.run_job(commit, stack.releases[1])
    ada.send("/releases/answers/swap", data={"release": stack.releases[1]})
    again = ada.see(follow)
    assert "sse:change" not in again
    assert f'Said by <a href="/releases/answers/{stack.releases[1]}"' in again
    assert "Its rows cannot be shown" in again, "the release names no commit of this hub"


def test_releases_are_compared_swapped_rolled_back_and_pinned(stack: Stack, ada: Person) -> None:
    first, second = stack.releases
    page = ada.see("/releases")
    # The second one stands below its parent.
    assert page.index(f"{first}</a>") < page.index("<ul>") < page.index(f"{second}</a>")
    beside = ada.see(f"/releases/answers/{second}?with={first}")
    assert "has no branch, tag or commit" in beside
    assert ada.see(f"/releases/answers/{first}/files/config.json").startswith("{")
    act = "/releases/answers"
    ada.send(f"{act}/swap", data={"release": second})
    served = '{}</a> <strong class="good">served</strong>'
    assert served.format(second) in ada.see("/releases")
    ada.send(f"{act}/rollback")
    ada.send(f"{act}/pin", data={"release": first})
    pinned = ' <strong class="good">pinned</strong>'
    assert served.format(first) + pinned in ada.see("/releases")
    ada.send(f"{act}/unpin", data={"release": first})
    assert pinned not in ada.see("/releases")
    ada.send(f"{act}/swap", 404, data={"release": "r000009-00000000"})
    assert f": {second}</li>" in ada.see("/releases")


def test_webhooks_are_made_tested_replayed_and_switched_off(
    stack: Stack, ada: Person, receiver: Receiver
) -> None:
    receiver.body = b"<script>alert(1)</script>"
    assert "No webhook yet" in ada.see("/webhooks")
    form = {"url": receiver.url, "watched": "dataset:local/facts", "secret": "s3cret"}
    path = ada.send("/webhooks", data=form).headers["location"]
    ada.send("/webhooks", 400, data={**form, "watched": "local/facts"})
    ada.send(f"{path}/test")
    assert receiver.wait_for(1)[0].headers["x-webhook-secret"] == "s3cret"
    wait_until(lambda: "&lt;script&gt;alert(1)" in ada.see(path))
    assert "<script>alert" not in ada.see(path)
    found = re.search('name="delivery" value="([^"]+)"', ada.see(path))
    assert found is not None
    ada.send(f"{path}/replay", data={"delivery": found[1], "force": "1"})
    receiver.wait_for(2)
    ada.send(f"{path}/disable")
    assert "disabled" in ada.see(path)
    ada.send(f"{path}/enable")
    assert path in ada.see("/webhooks")


def test_a_reader_sees_every_page_and_changes_nothing(stack: Stack, ada: Person) -> None:
    made = stack.hub.request("POST", "/api/settings/tokens/reader", params={"role": "read"}).json()
    first = stack.releases[0]
    with stack.person(made["token"]) as reader:
        for path in (
            *("/datasets", DATASET, f"{DATASET}/rows", f"{DATASET}/commit/{stack.head}"),
            *("/releases", f"/releases/answers/{first}", "/playground", "/webhooks"),
        ):
            page = reader.see(path)
            assert not re.search('method="post" action="/(?!logout|playground")', page), path
        for path in (
            *(f"{DATASET}/edit", "/playground/teach", "/webhooks", "/webhooks/none/test"),
            *(f"/releases/answers/{act}" for act in ("swap", "rollback", "pin")),
        ):
            refused = reader.client.post(path, data={"csrf": ada.csrf})
            assert refused.status_code == 403, path
        files = {"files": ("a.jsonl", b"{}")}
        assert reader.client.post(f"{DATASET}/upload", files=files).status_code == 403
    assert head_of(stack) == stack.head
