"""The console in a real browser: a person signs in by a link, sees a push arrive without a reload,
and starts a job. Every page fits a phone, and axe finds nothing serious in it."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import HfApi

from jobs.folder import LOG, METRICS, prepare_job_folder
from jobs.job import outcome_of
from jobs.spec import JobSpec
from jobs.store import JobStore
from pipeline.stack.services import health
from pipeline.tokens import read_tokens
from tests.jobs_fixtures import until
from tests.stack_fixtures import Workplace, configure, end_with_this_process, workplace_in

sync_api = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium: apt-get install chromium"),
]

SHOTS = os.environ.get("TEST_CONSOLE_SHOTS")
"""A folder for pictures of all pages, for a person who looks at them."""
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
    """A page whose browser is signed in. Whatever fails in it fails the test."""
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        faults: list[object] = []
        page.on("console", lambda said: faults.extend([said.text] * (said.type == "error")))
        page.on("pageerror", lambda error: faults.append(error))
        page.goto(hub.run("open", "--print").strip())
        yield page
        browser.close()
        assert not faults


def test_a_person_sees_a_push_arrive_and_starts_a_job(hub: Workplace, page: Any) -> None:
    page.get_by_text("git clone").wait_for()
    api = HfApi(endpoint=hub.url("hub"), token=read_tokens(hub.home / "tokens.json").hub)
    api.create_repo("local/facts", repo_type="dataset")
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
        job = store.claim("runner", 600)
        assert job is not None
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
        reason = page.get_by_label("Go past the gate")
        reason.fill("I know")
        with page.expect_response("**/jobs/j000001"):
            store.submit(JobSpec(command=("true",)), by_hand=True)
        page.wait_for_function("!document.querySelector('.htmx-request, .htmx-swapping')")
        assert reason.input_value() == "I know"
        page.goto(f"{hub.url('hub')}/jobs")
        page.get_by_role("link", name="j000002").wait_for()
    dataset = "/datasets/local/facts"
    for path in (
        *("/", "/jobs", "/jobs/j000001", "/jobs?state=CANCELED"),
        *("/datasets", dataset, f"{dataset}/rows", f"{dataset}/edit?file=rows.jsonl&line=1"),
        *("/releases", "/playground", "/webhooks"),
    ):
        _check(page, hub.url("hub"), path)


def _check(page: Any, url: str, path: str) -> None:
    for width in WIDTHS:
        for scheme in SCHEMES:
            page.set_viewport_size({"width": width, "height": 800})
            page.emulate_media(color_scheme=scheme)
            page.goto(url + path)
            assert page.evaluate("document.documentElement.scrollWidth") <= width, (path, width)
            page.evaluate((files("axe_core_python") / "axe.min.js").read_text())
            found = page.evaluate("axe.run()")["violations"]
            serious = [each for each in found if each["impact"] in ("serious", "critical")]
            assert not serious, (path, width, scheme, serious)
            if SHOTS is not None:
                name = f"{path.strip('/').replace('/', '-') or 'loop'}-{width}-{scheme}.png"
                page.screenshot(path=Path(SHOTS) / name, full_page=True)
