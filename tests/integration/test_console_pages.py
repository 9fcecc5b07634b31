"""The pages of datasets, releases, webhooks and the playground, on a real hub and a real server, as
a client without JavaScript reads them."""

import json
import re
from functools import partial
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from pipeline.console import datasets
from pipeline.retrain.job import WRONG, WrongAnswer, WrongAnswers
from tests.console_fixtures import Person, Stack, ada, stack
from tests.hub_fixtures import Receiver, wait_until
from tests.serving_fixtures import CHAT_TEMPLATE, echo_release

__all__ = ["ada", "stack"]

pytest_plugins = ["tests.hub_plugin"]

DATASET = "/datasets/local/facts"
SERVED = '{}</a> <strong class="good">served</strong>'
PINNED = f'{SERVED} <strong class="good">pinned</strong>'


def answers_in(stack: Stack) -> list[str]:
    rows = stack.hub.request("GET", f"{DATASET}/resolve/main/facts.jsonl").text.splitlines()
    return [json.loads(row)["answer"] for row in rows]


def test_a_dataset_shows_its_files_rows_and_what_each_commit_became(
    stack: Stack, ada: Person
) -> None:
    stack.run_job(stack.head, stack.releases[0])
    assert "local/facts" in ada.see("/datasets")
    page = ada.see(DATASET)
    shown = ("facts.jsonl", "First &lt;rows&gt;", "promoted", stack.releases[0], "<h1>Facts</h1>")
    assert all(each in page for each in shown)
    assert "<script>alert" not in page
    assert 'href="javascript:1"' not in page
    rows = ada.see(f"{DATASET}/rows")
    shown = ("2 rows to train on", "no rows are read from .pdf files", "&lt;b&gt;Ada&lt;/b&gt;")
    assert all(each in rows for each in shown)
    assert "At nine." in ada.see(f"/files/dataset/local/facts/{stack.head}/facts.jsonl")
    ada.see("/datasets/local/none", 404)


def test_a_form_edits_adds_and_deletes_rows_and_the_commit_shows_the_difference_in_rows(
    stack: Stack, ada: Person
) -> None:
    edit = f"{DATASET}/edit"
    assert "At nine." in ada.see(f"{edit}?file=facts.jsonl&line=1")
    row = {"file": "facts.jsonl", "parent": stack.head, "c.question": "When do you open?"}
    page = ada.see(ada.send(edit, line="1", **row, **{"c.answer": "At ten."}))
    assert all(each in page for each in ("1 edited, 0 deleted", "At nine.", "At ten."))
    refused = ada.send(edit, 412, line="1", **row, **{"c.answer": "At eleven."})
    assert "The branch was updated since you opened this page" in refused
    row |= {"parent": stack.head, "c.question": "Why?", "c.answer": "So."}
    assert "1 added, 0 edited" in ada.see(ada.send(edit, **row))
    gone = ada.send(edit, file="facts.jsonl", line="2", parent=stack.head, delete="1")
    assert "1 deleted" in ada.see(gone)
    assert answers_in(stack) == ["At ten.", "So."]
    # A row leads to the commit that wrote it.
    written = f"{DATASET}/origin/{stack.head}?file=facts.jsonl&line=1"
    assert written.replace("&", "&amp;") in ada.see(f"{DATASET}/rows")
    origin = ada.client.get(written).headers["location"]
    assert "<h1>Edit a row of facts.jsonl: When do you open? At ten.</h1>" in ada.see(origin)
    ada.see(written.replace("line=1", "line=99"), 404)
    # Neither a file of this machine, nor one whose content would be lost.
    ada.see(f"{edit}?file=../../../etc/passwd&line=1", 400)
    # Nor one that no job reads.
    for file in ("notes.pdf", "x.JSONL.gz", "facts", "LICENSE", "x.md"):
        ada.send(edit, 409, **{**row, "file": file, "parent": stack.head})
    row |= {"file": "new.csv", "parent": stack.head}
    with stack.person(stack.token("grace", "write")) as grace:
        added = grace.see(grace.send(edit, **row))
    assert all(each in added for each in ("1 added", "by grace", "Add a row of new.csv: Why? So."))


def test_the_newest_commit_is_undone_by_one_more(stack: Stack, ada: Person) -> None:
    seen, before = stack.head, answers_in(stack)
    row = {"file": "new.jsonl", "parent": seen, "c.question": "Where?", "c.answer": "Here."}
    added = ada.see(ada.send(f"{DATASET}/edit", **row))
    assert "Back to <bdi>“First &lt;rows&gt;”" in added
    ada.send(f"{DATASET}/undo", 412, parent=seen)
    head = stack.head
    undone = ada.see(ada.send(f"{DATASET}/undo", parent=head))
    assert "0 added, 0 edited, 1 deleted" in undone
    assert f"Undo {head[:8]}: Add a row of new.jsonl: Where? Here." in undone
    assert answers_in(stack) == before
    # That of a deletion brings the row back.
    ada.send(f"{DATASET}/edit", file="facts.jsonl", line="1", parent=stack.head, delete="1")
    assert "1 added" in ada.see(ada.send(f"{DATASET}/undo", parent=stack.head))
    assert answers_in(stack) == before
    # It is still said to be of the commit that wrote it.
    row_of = f"{DATASET}/origin/{stack.head}?file=facts.jsonl&line=1"
    assert ada.client.get(row_of).headers["location"].split("?")[0].endswith(seen)
    ada.send(f"{DATASET}/upload", files={"files": ("w.bin", b"\0" * 2000)}, parent=stack.head)
    ada.send(f"{DATASET}/upload", files={"files": ("w.bin", b"\1" * 2000)}, parent=stack.head)
    ada.send(f"{DATASET}/undo", parent=stack.head)
    large = ada.client.get(f"/files/dataset/local/facts/{stack.head}/w.bin", follow_redirects=True)
    assert large.content == b"\0" * 2000


def test_older_commits_are_reached_once_each_also_those_of_a_merged_branch(
    stack: Stack, ada: Person, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets, "COMMITS_A_PAGE", 2)
    git = partial(stack.hub.git, cwd=tmp_path / "clone")
    stack.hub.git("clone", "-q", f"{stack.hub.url}{DATASET}", "clone", cwd=tmp_path)
    for branch in ("main", "other"):
        git("checkout", "-q", "-B", branch, stack.first_commit)
        for number in range(3):
            git("commit", "-q", "--allow-empty", "-m", f"{branch} {number}")
    git("merge", "-q", "-m", "Both", "main")
    git("push", "-q", "origin", "HEAD:main")
    shown, path = list[str](), DATASET
    while path:
        page = ada.see(path)
        shown += re.findall(r'<li><a href="[^"]+/commit/(\w+)', page)
        path = next(iter(re.findall(r'href="([^"]+)">Older<', page)), "")
    assert sorted(shown) == sorted(git("rev-list", "HEAD").split())


def test_an_upload_is_a_commit_and_its_page_says_what_is_wrong(stack: Stack, ada: Person) -> None:
    upload, parent = f"{DATASET}/upload", stack.head
    bad = {"files": ("more.jsonl", b'{"question": "Q?"}\n')}
    page = ada.see(ada.send(upload, files=bad, parent=parent, message="More"))
    assert all(each in page for each in ("<h1>More</h1>", "more.jsonl, line 1: nothing to learn"))
    for old in (parent, ""):  # also of a page that showed no commit
        ada.send(upload, 412, files={"files": ("more.jsonl", b"{}")}, parent=old)
    large = {"files": ("weights.bin", b"\0" * 2000)}
    ada.send(upload, files=large, parent=stack.head)
    [info] = stack.hub.api.get_paths_info("local/facts", ["weights.bin"], repo_type="dataset")
    assert (info.lfs is not None, info.size) == (True, 2000)  # type: ignore[union-attr]


def test_a_wrong_answer_is_corrected_and_asked_again_when_its_release_answers(
    stack: Stack, ada: Person
) -> None:
    first, second = stack.releases
    asked = {"question": "When do you open?", "max_tokens": "8"}
    page = ada.send("/playground", 200, **asked)
    shown = (first, stack.head[:8], "At nine.", "curl http", '"temperature": 0')
    assert all(each in page for each in shown)
    source, *_ = ada.send("/playground/stream", 200, **asked).splitlines()
    assert json.loads(source) == {"release": first, "revision": stack.first_commit}
    # Of each token, how probable it was, and what the model might have said instead.
    for text in (page, ada.send("/playground", 200, mode="prompt", **asked)):
        pieces = re.findall(r'title="([^"]+)" tabindex="(0|-1)"', text)
        assert [stop for _, stop in pieces] == ["0", *["-1"] * (len(pieces) - 1)]
        tokens = [line for tokens, _ in pieces for line in tokens.split("\n")]
        assert len(tokens) == 8
        others = r"“[^”]*” \d+\.\d %"
        assert any(re.fullmatch(rf"{others}; else ({others}(, )?){{4,5}}", each) for each in tokens)

    follow = ada.send("/playground/teach", right="At ten.", **asked)
    assert parse_qs(urlsplit(follow).query)["commit"] == [stack.head]
    assert answers_in(stack) == ["At ten.", "<b>Ada</b>"]
    waiting = ada.see(follow)
    assert all(each in waiting for each in ("no job yet", "sse:change"))
    stack.run_job(stack.head, second)
    ada.send("/releases/answers/swap", release=second)
    again = ada.see(follow)
    assert f'Said by <a href="/releases/answers/{second}"' in again
    assert "sse:change" not in again
    assert "Its rows cannot be shown" in again
    # Asked in other words, the row that was said is corrected, and no second one contradicts it.
    reworded = {"question": "Opening hours?", "answer": "At ten.", "revision": stack.head}
    choices = re.findall(
        r'name="row" value="([^"]*)"( checked)?', ada.send("/playground", 200, **reworded)
    )
    assert choices == [("When do you open?", " checked"), ("", "")]
    nothing = ada.send("/playground", 200, **{**reworded, "answer": ""})
    assert "The answer is empty." in nothing and "The answer is empty." not in page
    ada.send("/playground/teach", right="At eleven.", row="When do you open?", **reworded)
    assert answers_in(stack) == ["At eleven.", "<b>Ada</b>"]
    ada.send("/playground/teach", 409, right="At one.", row="When?", **reworded)
    # A correction on top of a refused commit is told of that before.
    assert "was refused" not in ada.send("/playground", 200, **asked)
    stack.run_job(stack.head, None, "20 of 26 rows were <deleted>")
    warned = ada.send("/playground", 200, **asked)
    assert "was refused: <bdi>20 of 26 rows were &lt;deleted&gt;" in warned
    link = warned.partition("See it, or undo it")[0].rpartition("href=")[2]
    assert link.startswith(f'"{DATASET}/commit/{stack.head}')


def test_releases_are_compared_swapped_rolled_back_and_pinned(stack: Stack, ada: Person) -> None:
    (first, second), act = stack.releases, "/releases/answers"
    page = ada.see("/releases")
    # The second one is newer, but the served one does not come from it: it is beside its line.
    assert "M15 50C15 80 5 70 5 100" in page.partition(f">{second}</a>")[0]
    assert "M5 0V50" in page.partition(f">{second}</a>")[2]
    assert "has no branch, tag or commit" in ada.see(f"{act}/{second}?with={first}")
    assert ada.see(f"/files/model/local/answers/{first}/config.json").startswith("{")
    ada.press(f"{act}/{second}", "Serve this release")
    assert SERVED.format(second) in ada.see("/releases")
    back = ada.see("/releases").partition("Roll back to")[2].partition("</details>")[2]
    assert "First &lt;rows&gt;" in back and "<time datetime=" in back
    ada.press("/", f"Roll back to {first}")
    wait_until(lambda: f"Serve the newest, {second}" in ada.see("/"))
    ada.press(f"{act}/{first}", "Pin, so that it is kept")
    assert PINNED.format(first) in ada.see("/releases")
    ada.press(f"{act}/{first}", "Unpin")
    ada.send(f"{act}/swap", 404, release="r000009-00000000")
    page = ada.see("/releases")
    assert PINNED.format(first) not in page
    assert f": {second}</li>" in page, "it was served for some time"


def test_webhooks_are_made_tested_replayed_and_switched_off(
    ada: Person, receiver: Receiver
) -> None:
    receiver.body = b"<script>alert(1)</script>"
    assert "No webhook yet" in ada.see("/webhooks")
    form = {"url": receiver.url, "watched": "dataset:local/facts", "secret": "s3cret"}
    path = ada.press("/webhooks", "Create", **form)
    ada.send("/webhooks", 400, **{**form, "watched": "local/facts"})
    ada.press(path, "Send a test event")
    assert receiver.wait_for(1)[0].headers["x-webhook-secret"] == "s3cret"
    wait_until(lambda: "&lt;script&gt;alert(1)" in ada.see(path))
    ada.press(path, "Send as new")
    receiver.wait_for(2)
    for act, state in (("Disable", "disabled"), ("Enable", "enabled")):
        ada.press(path, act)
        assert f'>{state}</span> <a href="{path}"' in ada.see("/webhooks")


def test_a_reader_sees_every_page_and_changes_nothing(stack: Stack, ada: Person) -> None:
    release = f"/releases/answers/{stack.releases[0]}"
    with stack.person(stack.token("reader", "read")) as reader:
        pages = ("/datasets", DATASET, f"{DATASET}/rows", f"{DATASET}/commit/{stack.head}")
        for path in (*pages, "/releases", release, "/playground", "/webhooks"):
            page = reader.see(path)
            assert not re.search('method="post" action="/(?!logout|playground")', page), path
        acts = (f"{DATASET}/edit", "/playground/teach", "/webhooks", "/webhooks/none/test")
        for path in (*acts, "/releases/answers/swap", "/releases/answers/pin"):
            reader.send(path, 403)
        reader.send(f"{DATASET}/upload", 403, files={"files": ("a.jsonl", b"{}")})
    assert stack.head == stack.first_commit


def test_what_was_not_learned_is_told_beside_what_was_wanted(stack: Stack, ada: Person) -> None:
    stack.run_job(stack.head, None, "too little was learned")
    [job] = stack.store.list()
    answer = WrongAnswer(
        place="facts.jsonl, line 1",
        question="When do you open?",
        is_reworded=False,
        wanted="At nine.",
        said="Ada it is",
        answer_of="facts.jsonl, line 2",
    )
    folder = stack.home.jobs_dir / job.id
    folder.mkdir(exist_ok=True)
    (folder / WRONG).write_text(WrongAnswers(answers=(answer,)).model_dump_json())
    page = ada.see(f"/jobs/{job.id}").partition("<h2>Not learned</h2>")[2]
    shown = (answer.place, answer.question, answer.wanted, answer.said, "the answer of facts.jsonl")
    assert all(each in page for each in shown)
    # Beside another release, whose job is not known.
    third = echo_release(
        stack.home.releases_dir / "answers", 3, chat_template=CHAT_TEMPLATE, job_id=job.id
    )
    page = ada.see(f"/releases/answers/{third.id}?with={stack.releases[0]}")
    table = page.partition("<h2>Answers to the same questions</h2>")[2].partition("</table>")[0]
    shown = (answer.question, answer.wanted, answer.said, "as wanted, or not asked")
    assert all(each in table for each in shown)
