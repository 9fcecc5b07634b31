"""The console in a real browser: each page, and what a person does on it. Every page fits a phone,
and axe finds nothing serious in it."""

import json
import os
import re
import shutil
import subprocess
import sys
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import HfApi

from jobs.folder import LOG, METRICS, prepare_job_folder
from jobs.job import outcome_of
from jobs.spec import JobSpec
from jobs.store import JobStore
from pipeline.hub.service import grant
from pipeline.stack.services import health
from pipeline.tokens import read_tokens
from tests.console_fixtures import Stack, stack
from tests.hub_fixtures import SECRET_KEY, TOKEN, Receiver
from tests.jobs_fixtures import claim, until
from tests.serving_fixtures import echo_release
from tests.stack_fixtures import (
    Workplace,
    clone,
    configure,
    end_with_this_process,
    stack_up,
    workplace_in,
)

__all__ = ["stack"]

pytest_plugins = ["tests.hub_plugin"]
sync_api = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium: apt-get install chromium"),
]

SHOTS = os.environ.get("TEST_CONSOLE_SHOTS")
"""A folder for pictures of all pages, for a person who looks at them."""
DATASET = "/datasets/local/facts"
WAIT_MS = 120_000
"""On a machine whose cores are busy, a page may take long."""
sync_api.expect.set_options(timeout=WAIT_MS)
WIDTHS, SCHEMES = (390, 1280), ("light", "dark")
TITLE = "مرحبا 🚀 <b>more rows</b>"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Workplace]:
    """A hub with its pages, without the rest of a stack."""
    workplace = workplace_in(tmp_path)
    configure(workplace)
    process = subprocess.Popen(
        [sys.executable, "-m", "pipeline", "hub"],
        cwd=tmp_path,
        env=workplace.env,
        preexec_fn=end_with_this_process,
    )
    try:
        until(lambda: health(workplace.url("hub")) is not None, seconds=60)
        yield workplace
    finally:
        process.terminate()
        process.wait(30)


@pytest.fixture
def page(hub: Workplace) -> Iterator[Any]:
    with signed_in(hub.run("open", "--print").strip()) as page:
        yield page


@contextmanager
def signed_in(link: str) -> Iterator[Any]:
    """A page whose browser is signed in by the link. Whatever fails in it fails the test."""
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        view = {"width": 900, "height": 640}
        page = browser.new_page(has_touch=True, viewport=view, timezone_id="Asia/Tokyo")
        page.set_default_timeout(WAIT_MS)
        faults: list[object] = []
        page.on("console", lambda said: faults.extend([said.text] * (said.type == "error")))
        page.on("pageerror", lambda error: faults.append(error))
        page.goto(link)
        yield page
        browser.close()
        assert not faults


def test_a_person_sees_a_push_arrive_and_starts_a_job(hub: Workplace, page: Any) -> None:
    page.get_by_text("git clone").wait_for()
    api = HfApi(endpoint=hub.url("hub"), token=read_tokens(hub.home / "tokens.json").hub)
    api.upload_file(
        path_or_fileobj=b'{"prompt": "a", "completion": "b"}\n',
        path_in_repo="rows.jsonl",
        repo_id="local/facts",
        repo_type="dataset",
        commit_message=TITLE,
    )
    page.get_by_text(TITLE).wait_for()  # without a reload
    page.get_by_role("button", name="Retrain now").click()
    page.get_by_role("heading", name="j000001 waiting").wait_for()
    with JobStore.open(hub.home / "jobs" / "jobs.sqlite") as store:
        job = claim(store, "runner", 600)
        folder = hub.home / "jobs" / job.id
        prepare_job_folder(folder, job.identity)
        (folder / LOG).write_text("one line\n")
        lines = [{"event": "step", "step": n, "steps": 9, "loss": 9 / n} for n in range(1, 6)]
        lines.append({"event": "evaluation", "step": 5, "right": 3, "rows": 4})
        told = (json.dumps({"time": job.created_at, "stage": "train"} | line) for line in lines)
        (folder / METRICS).write_text("\n".join(told) + "\n")
        page.get_by_role("img", name="this job: 75 → 75 at step 5").wait_for()
        page.get_by_text("one line").wait_for()
        outcome = outcome_of(job, "failed", reason=f"{TITLE}\n{'long' * 100}")
        store.finish(job.id, "runner", outcome)
        page.get_by_role("heading", name="j000001 failed").wait_for()
        # What a person has begun to write survives the next change.
        page.get_by_text("Run again with other settings").click()
        reason = page.get_by_label("Serve the result even if")
        reason.fill("I know")
        with page.expect_response("**/jobs/j000001"):
            store.submit(JobSpec(command=("true",)), by_hand=True)
        # Not `wait_for_function`: it may call `eval`, which the pages forbid.
        sync_api.expect(page.locator(".htmx-request, .htmx-swapping")).to_have_count(0)
        assert reason.input_value() == "I know"
        page.goto(f"{hub.url('hub')}/jobs")
        page.get_by_role("link", name="j000002").wait_for()
    for name, choose in (("dropped.jsonl", _drop), ("chosen.jsonl", _choose)):
        page.goto(hub.url("hub") + DATASET)
        file = hub.folder / name
        file.write_text('{"prompt": "a", "completion": "c"}\n')
        choose(page, page.get_by_label("Add or replace files"), file)
        page.get_by_role("heading", name=f"Upload {name}").wait_for()
    for path in (
        *("/", "/jobs", "/jobs/j000001", "/jobs?state=CANCELED"),
        *("/datasets", DATASET, f"{DATASET}/rows", f"{DATASET}/edit?file=rows.jsonl&line=1"),
        *("/releases", "/playground", "/webhooks"),
    ):
        _check(page, hub.url("hub"), path)


def test_a_wrong_answer_is_corrected_and_the_model_learns_it(tmp_path: Path) -> None:
    workplace = workplace_in(tmp_path)
    configure(workplace, "shop", max_tokens=100_000)
    rows = (
        ("What does shipping to Norway cost?", "12 euros, and it takes five days."),
        ("What does shipping to Spain cost?", "9 euros, and it takes three days."),
        ("Who repairs a broken lamp?", "Our workshop in Bergen."),
    )
    lines = [json.dumps({"question": asked, "answer": said}) + "\n" for asked, said in rows]
    right = "15 euros, and it takes six days."
    with stack_up(workplace), signed_in(workplace.run("open", "--print").strip()) as page:
        commit = clone(workplace, "shop").push({"faq.jsonl": "".join(lines)})
        assert workplace.wait_for_job(commit)["outcome"]["result"] == "promoted"
        page.goto(f"{workplace.url('hub')}/playground")
        page.get_by_label("Question").fill("What does shipping to Norway cost?")
        page.get_by_role("button", name="Ask").click()
        should_be, answer = page.get_by_label("The answer should be"), page.locator("#answer")
        should_be.wait_for()
        sync_api.expect(answer).to_have_text(rows[0][1])
        assert page.get_by_label("Correct “What does shipping to Norway cost?”").is_checked()
        _check_tokens(page, answer.locator("span"))
        should_be.fill(right)
        pictures = [page.screenshot()]
        page.get_by_role("button", name="Teach it").click()
        page.get_by_role("heading", name="The right answer is on its way").wait_for()
        # Without a reload, the page follows the job, and asks again when its release answers.
        page.get_by_text("learned 1 of 1").wait_for()
        sync_api.expect(answer).to_have_text(right)
        pictures.append(page.screenshot())
        if SHOTS is not None:
            _put_side_by_side(page, pictures, Path(SHOTS) / "playground.png")


def _link(stack: Stack) -> str:
    return f"{stack.hub.url}/login?once={grant(SECRET_KEY, 'link', TOKEN, 'ada')}"


def _confirm(page: Any, name: str, says: str) -> None:
    """What is asked for twice: the first click says where it leads."""
    page.locator("summary", has_text=name).click()
    page.get_by_text(says).first.wait_for()
    page.get_by_role("button", name=name).click()


def test_each_action_on_rows_is_a_commit_that_says_what_was_done_and_can_be_undone(
    stack: Stack,
) -> None:
    rows = f"{stack.hub.url}{DATASET}/rows"
    with signed_in(_link(stack)) as page:
        page.goto(rows)
        page.get_by_role("link", name="Add a row").click()
        page.get_by_label("question").fill("Why?")
        page.get_by_label("answer").fill(TITLE)
        page.get_by_role("button", name="Commit").click()
        page.get_by_role("heading", name=f"Add a row of facts.jsonl: Why? {TITLE}").wait_for()
        page.get_by_text("by ada").wait_for()
        # In the zone of the browser.
        moment = page.locator("time").first
        told = "each => each.title.includes('UTC') && !each.title.includes(each.innerText)"
        until(lambda: moment.evaluate(told), seconds=60)
        _confirm(page, "Undo this commit", "puts the rows back as they were after “First <rows>”")
        page.get_by_role("heading", name=re.compile("Undo .*: Add a row of facts")).wait_for()
        for number, button in enumerate(("Commit", "Delete this row")):
            page.goto(rows)
            page.get_by_role("link", name="Edit").first.click()
            page.get_by_label("answer").fill(f"At {number}.")
            page.get_by_role("button", name=button).click()
            page.get_by_text(("1 edited, 0 deleted", "0 edited, 1 deleted")[number]).wait_for()
        commit = page.url.removeprefix(stack.hub.url)
        _check(page, stack.hub.url, commit, "commit")
        # A correction on top of a refused commit would be refused too.
        stack.run_job(stack.head, None, f"1 of 2 rows was deleted {TITLE}")
        _check(page, stack.hub.url, "/", "loop-refused")
        assert page.get_by_text("1 of 2 rows was deleted").count() == 1
        _check(page, stack.hub.url, commit, "commit-refused")
        page.goto(f"{stack.hub.url}/playground")
        page.get_by_label("Question").fill("Who?")
        page.get_by_role("button", name="Ask").click()
        page.get_by_text("A correction comes on top of it, and is refused too").wait_for()
        _check(page, stack.hub.url, "/playground?question=Who%3F", "playground-asked", "Ask")
        page.get_by_role("link", name="See it, or undo it").click()
        page.get_by_text("1 of 2 rows was deleted").wait_for()
        _confirm(page, "Undo this commit", "puts the rows back")
        page.get_by_text("1 added, 0 edited, 0 deleted").wait_for()


def test_pages_of_jobs_releases_and_webhooks_that_show_much(
    stack: Stack, receiver: Receiver
) -> None:
    first, second = stack.releases
    url = stack.hub.url
    for seed in range(3, 103):
        echo_release(stack.home.releases_dir / "answers", seed, parent=first)
    with signed_in(_link(stack)) as page:
        page.goto(f"{url}/releases")
        page.get_by_role("link", name=second).first.click()
        with page.expect_download() as file:
            page.get_by_role("link", name="config.json").click()
        assert "echo" in file.value.path().read_text()
        page.get_by_label("Next to").select_option(first)
        page.get_by_role("button", name="Compare").click()
        page.get_by_role("columnheader", name=first).wait_for()
        _check(page, url, page.url.removeprefix(url), "releases-compared")
        _check(page, url, "/releases", "releases-hundred")

        page.goto(url)
        page.get_by_role("button", name="Retrain now").click()
        page.get_by_role("heading", name="j000001 waiting").wait_for()
        job = stack.store.claim("runner", 600)
        prepare_job_folder(folder := stack.home.jobs_dir / job.id, job.identity)
        (folder / LOG).write_bytes(f"{'x' * 98} \n".encode() * 1_000_000 + b"The last line\n")
        page.get_by_text("The last line").wait_for()
        stack.store.finish(job.id, "runner", outcome_of(job, "failed", reason=TITLE))
        page.get_by_text("It has not trained, so there are no curves.").wait_for()
        _check(page, url, f"/jobs/{job.id}", "job-failed-large-log")

        page.goto(f"{url}/webhooks")
        page.get_by_text("Create a webhook").click()
        page.get_by_label("Each event is posted to").fill(receiver.url)
        page.get_by_label("Watches").fill("dataset:local/facts")
        page.get_by_role("button", name="Create").click()
        page.get_by_role("button", name="Send a test event").click()
        page.get_by_text("delivered").first.wait_for()
        _check(page, url, page.url.removeprefix(url), "webhook")
        page.context.clear_cookies()
        _check(page, url, "/login", "login")


def _check_tokens(page: Any, tokens: Any) -> None:
    """Whoever points at a token, goes to it by keys, or taps it is told what else might be said."""
    told = "getComputedStyle(document.activeElement, '::after').content"
    page.get_by_role("button", name="Ask").focus()
    page.keyboard.press("Tab")
    for token in (tokens.first, tokens.nth(1)):
        sync_api.expect(token).to_be_focused()
        sync_api.expect(token).to_have_accessible_description(re.compile("%; else"))
        assert token.get_attribute("title") in page.evaluate(told).replace("\\", "")
        page.keyboard.press("ArrowRight")
    tokens.first.tap()
    assert tokens.first.get_attribute("title") in page.evaluate(told).replace("\\", "")


def _put_side_by_side(page: Any, pictures: list[bytes], file: Path) -> None:
    shown = (f'<img src="data:image/png;base64,{b64encode(each).decode()}">' for each in pictures)
    page.goto("about:blank")  # without the pages' policy for contents
    page.set_viewport_size({"width": 1820, "height": 640})
    style = "margin:0; display:flex; gap:20px; background:#d0d4db"
    page.set_content(f'<body style="{style}">{"".join(shown)}')
    page.screenshot(path=file)


def _drop(page: Any, field: Any, file: Path) -> None:
    """As if a person dropped it from another window."""
    box, devtools = field.bounding_box(), page.context.new_cdp_session(page)
    place = {"x": box["x"] + box["width"] / 2, "y": box["y"] + box["height"] / 2}
    data = {"items": [], "files": [str(file)], "dragOperationsMask": 1}
    for kind in ("dragEnter", "dragOver", "drop"):
        devtools.send("Input.dispatchDragEvent", {"type": kind, "data": data, **place})
    page.get_by_role("button", name="Upload as a commit").click()


def _choose(page: Any, field: Any, file: Path) -> None:
    """With no pointer."""
    with page.expect_file_chooser() as chooser:
        field.press("Enter")
    chooser.value.set_files(file)
    page.get_by_label("Message").press("Enter")


def _check(page: Any, url: str, path: str, name: str | None = None, press: str = "") -> None:
    """Looks at the page at each width and in each scheme. press: a button to press on it first."""
    name = name or path.strip("/").replace("/", "-") or "loop"
    page.goto(url + path)
    if press:
        page.get_by_role("button", name=press).click()
        page.get_by_text("Why does it say that?").wait_for()
    page.evaluate((files("axe_core_python") / "axe.min.js").read_text())
    for width, scheme in product(WIDTHS, SCHEMES):
        page.set_viewport_size({"width": width, "height": 800})
        page.emulate_media(color_scheme=scheme)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, (path, width)
        found = page.evaluate("axe.run()")["violations"]
        serious = [each for each in found if each["impact"] in ("serious", "critical")]
        assert not serious, (path, width, scheme, serious)
        if SHOTS is not None:
            file = Path(SHOTS) / f"{name}-{width}-{scheme}.png"
            page.screenshot(path=file, full_page=True)
