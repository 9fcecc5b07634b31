"""The console's shell on a real hub: who gets in, who may change anything, and what is shown."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest

from jobs.folder import LOG, METRICS, prepare_job_folder
from jobs.job import Job, outcome_of, seal
from jobs.spec import JobSpec, RevisionRange
from jobs.store import JobStore
from pipeline.console.app import create_router
from pipeline.console.page import Console
from pipeline.hub.service import grant
from pipeline.paths import Home
from pipeline.settings import PipelineSettings, Settings
from tests.console_fixtures import Person, Stack, ada, stack
from tests.hub_fixtures import SECRET_KEY, running_hub
from tests.jobs_fixtures import claim

__all__ = ["ada", "stack"]

EVIL = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)> مرحبا 🚀 \x1b[31mred\x1b[0m"
ODD = quote(EVIL, safe="")
DATASET = "/datasets/local/facts"
PAGES = (
    *("/", "/jobs", "/jobs/j000001", "/jobs?state=ERROR&pipeline=answers"),
    *(DATASET, f"{DATASET}/rows", f"{DATASET}/edit?file=rows.jsonl&line=1"),
    f"{DATASET}/commit/main",
    f"/playground?question={ODD}",
)


@pytest.fixture
def client(stack: Stack) -> Iterator[httpx.Client]:
    """One that has not signed in."""
    with httpx.Client(base_url=stack.hub.url) as client:
        yield client


def failed_job(stack: Stack) -> Job:
    """A job all of whose texts are hostile."""
    revisions = RevisionRange(repo="local/facts", ref="refs/heads/main", new_sha="a" * 40)
    spec = JobSpec(
        command=("true", EVIL),
        pipeline="answers",
        env={"NAME": EVIL},
        labels={EVIL: EVIL},
        sealed_env=seal({"HIDDEN": "hidden-value"}, SECRET_KEY),
        revisions=revisions,
    )
    stack.store.submit(spec, by_hand=True)
    job = claim(stack.store)
    folder = stack.home.jobs_dir / job.id
    prepare_job_folder(folder, job.identity)
    (folder / LOG).write_text(f"first\n{'x' * 70_000}\n1 %\r99 %\n{EVIL}\n")
    (folder / METRICS).write_text(
        "".join(
            json.dumps({"time": 1.0, "stage": "train", "event": "step", **values}) + "\n"
            for values in ({"step": 1, "loss": 4.0}, {"step": 2, "loss": 1.0, "steps": 9})
        )
    )
    answer = {"place": EVIL, "question": EVIL, "is_reworded": False, "wanted": EVIL}
    wrong = {"answers": [answer | {"said": EVIL, "answer_of": EVIL}]}
    (folder / "wrong.json").write_text(json.dumps(wrong))
    return stack.store.finish(job.id, "me", outcome_of(job, "failed", reason=EVIL))


def test_without_a_session_there_is_only_the_way_in(stack: Stack, client: httpx.Client) -> None:
    for path in (*PAGES, "/events"):
        answer = client.get(path)
        assert answer.status_code == 303
        assert answer.headers["location"].startswith("/login?next=/")
    assert client.post("/login", data={"token": "wrong"}).status_code == 401
    assert client.post("/pipelines/answers/retrain").status_code == 303
    token = {"token": stack.hub.token, "next": "//evil.example"}
    assert client.post("/login", data=token).headers["location"] == "/"
    there = client.post("/login", data=token | {"next": "/jobs?state=ERROR"})
    assert there.headers["location"] == "/jobs?state=ERROR"
    foreign = {"Origin": "https://evil.example"}
    assert client.post("/login", data=token, headers=foreign).status_code == 403
    # Other clients notice nothing of the pages.
    assert client.get("/api/whoami-v2").status_code == 401
    assert client.get("/datasets/local/facts/info/refs").status_code == 401


def test_a_link_signs_in_once(stack: Stack, client: httpx.Client) -> None:
    link = f"/login?once={grant(SECRET_KEY, 'link', stack.hub.token, 'ada')}"
    with httpx.Client(base_url=stack.hub.url) as first:
        signed_in = first.get(link)
        assert signed_in.status_code == 303
        assert {"HttpOnly", "SameSite=strict"} <= {*signed_in.headers["set-cookie"].split("; ")}
        assert first.get("/jobs").status_code == 200
        cookie = next(iter(first.cookies.values()))
        # Neither again, nor as another text of the same bytes, nor is a session a link.
        for text in (link, link.replace("once=", "once=%0A"), f"/login?once={cookie}"):
            assert client.get(text).status_code == 403
        assert client.get("/jobs").status_code == 303


def test_only_who_may_write_changes_anything_and_only_by_a_form_of_the_session(
    stack: Stack,
) -> None:
    job = stack.store.submit(JobSpec(command=("true",)), by_hand=True)
    path = f"/jobs/{job.id}/cancel"
    with (
        stack.person(stack.token("reader", "read")) as reader,
        stack.person(stack.token("writer", "write")) as writer,
    ):
        assert f">Cancel {job.id}</button>" not in reader.see(f"/jobs/{job.id}")
        reader.send(path, 403)
        writer.send(path, 403, csrf=reader.csrf)
        assert writer.client.post(path).status_code == 403
        assert stack.store.get(job.id).state == "SCHEDULING"
        assert writer.press(f"/jobs/{job.id}", f"Cancel {job.id}") == f"/jobs/{job.id}"
        assert stack.store.get(job.id).state == "CANCELED"
        # A command may do anything as the user of the runner.
        writer.send(f"/jobs/{job.id}/retry", 409)
        # The token is revoked, and with it the session.
        stack.hub.request("DELETE", "/api/settings/tokens/writer")
        writer.see("/jobs", 303)


def test_a_job_is_run_again(stack: Stack, ada: Person) -> None:
    job = failed_job(stack)
    again = ada.press(f"/jobs/{job.id}", "Retry")
    assert stack.store.get(again.removeprefix("/jobs/")).spec == job.spec
    # One job by hand may wait; the page says so.
    assert "j000002" in ada.send(f"/jobs/{job.id}/retry", 409)
    ada.press(again, "Cancel j000002")
    other = ada.press(f"/jobs/{job.id}", "Run", mode="full", reason="I know")
    asked = stack.store.get(other.removeprefix("/jobs/")).spec.settings
    assert (asked["train"]["mode"], asked["force_reason"]) == ("full", "I know")


def test_hostile_texts_are_only_text(stack: Stack, ada: Person) -> None:
    failed_job(stack)
    stack.hub.api.upload_file(
        path_or_fileobj=json.dumps({"question": EVIL, "answer": EVIL}).encode(),
        path_in_repo="rows.jsonl",
        repo_id="local/facts",
        repo_type="dataset",
        commit_message=EVIL,
    )
    for path in (*PAGES, f"/login?next={ODD}", f"/jobs/{ODD}", f"/jobs?state={ODD}"):
        answer = ada.client.get(path)
        assert "<script>a" not in answer.text and "<img" not in answer.text
        assert "script-src 'self'" in answer.headers["content-security-policy"]
        assert path not in PAGES or "&lt;script&gt;" in answer.text
    page = ada.see("/jobs/j000001")
    assert "99 %" in page and "1 %\r" not in page and "\x1b" not in page.partition("Log")[2][:99]
    assert "hidden-value" not in page and "HIDDEN" in page
    assert "this job: 4 → 1 at step 2" in page and "step 2 of at most 9" in page
    # The page has the end of the log; the whole is a text without colours.
    assert "first\n" not in page
    log = ada.client.get("/jobs/j000001/log")
    assert log.text.startswith("first\n") and log.text.endswith(" red\n")
    assert log.headers["content-type"].startswith("text/plain")


def test_the_stream_tells_of_changes_until_the_browser_or_the_hub_goes(tmp_path: Path) -> None:
    pipelines = (PipelineSettings(name="facts", dataset="local/facts"),)
    settings = Settings().model_copy(update={"pipelines": pipelines})
    console = Console(home=Home(tmp_path), settings=settings)
    with (
        JobStore.open(tmp_path / "jobs.sqlite") as store,
        httpx.Client() as client,
        ExitStack() as streams,
    ):
        with running_hub(
            console.home.hub_dir, jobs_store=store, console=create_router(console)
        ) as hub:
            client.post(f"{hub.url}/login", data={"token": hub.token})
            assert "Nothing yet." in client.get(hub.url).text
            with client.stream("GET", f"{hub.url}/events") as first:
                seen = next(first.iter_lines()).removeprefix("id: ")
            # A page that has seen this is told again only after a change.
            url = f"{hub.url}/events?seen={seen}"
            lines = streams.enter_context(client.stream("GET", url)).iter_lines()
            store.submit(JobSpec(command=("true",)), by_hand=True)
            assert next(lines) not in ("", f"id: {seen}")
            assert next(lines) == "event: change"
        assert [line for line in lines if line] == ["data: "]
