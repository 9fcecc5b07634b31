"""The console's shell on a real hub: who gets in, who may change anything, and what is shown."""

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest

from jobs.folder import LOG, METRICS, prepare_job_folder
from jobs.job import Job, outcome_of, seal
from jobs.spec import JobSpec, RevisionRange
from jobs.store import JobStore
from pipeline.console.app import create_router
from pipeline.console.page import Console, sealed
from pipeline.paths import Home
from pipeline.settings import PipelineSettings, Settings
from tests.hub_fixtures import SECRET_KEY, RunningHub, running_hub

EVIL = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)> مرحبا 🚀 \x1b[31mred\x1b[0m"
ODD = quote(EVIL, safe="")
DATASET = "/datasets/local/facts"
PAGES = (
    *("/", "/jobs", "/jobs/j000001", "/jobs?state=ERROR&pipeline=facts"),
    *(DATASET, f"{DATASET}/rows", f"{DATASET}/edit?file=rows.jsonl&line=1"),
    f"{DATASET}/commit/main",
    f"/playground?question={ODD}",
)


class Stack:
    def __init__(self, home: Home, store: JobStore, hub: RunningHub) -> None:
        self.home, self.store, self.hub = home, store, hub

    @contextmanager
    def browser(self, token: str | None = None) -> Iterator[httpx.Client]:
        """A client that has signed in with the token; with None, with no token."""
        with httpx.Client(base_url=self.hub.url) as client:
            if token is not None:
                answer = client.post("/login", data={"token": token, "next": "/jobs?state=ERROR"})
                assert (answer.status_code, answer.headers["location"]) == (
                    303,
                    "/jobs?state=ERROR",
                )
            yield client

    def token(self, name: str, role: str) -> str:
        made = self.hub.request("POST", f"/api/settings/tokens/{name}?role={role}")
        return str(made.json()["token"])

    def failed_job(self) -> Job:
        """A job all of whose texts are hostile."""
        revisions = RevisionRange(repo="local/facts", ref="refs/heads/main", new_sha="a" * 40)
        spec = JobSpec(
            command=("true", EVIL),
            pipeline="facts",
            env={"NAME": EVIL},
            labels={EVIL: EVIL},
            sealed_env=seal({"HIDDEN": "hidden-value"}, SECRET_KEY),
            revisions=revisions,
        )
        job = self.store.submit(spec, by_hand=True)
        assert self.store.claim("runner", 100) is not None
        folder = self.home.jobs_dir / job.id
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
        return self.store.finish(job.id, "runner", outcome_of(job, "failed", reason=EVIL))


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    home = Home(tmp_path)
    pipelines = (PipelineSettings(name="facts", dataset="local/facts"),)
    settings = Settings().model_copy(update={"pipelines": pipelines})
    router = create_router(Console(home=home, settings=settings))
    with (
        JobStore.open(tmp_path / "jobs.sqlite") as store,
        running_hub(home.hub_dir, jobs_store=store, console=router) as hub,
    ):
        yield Stack(home, store, hub)


def csrf_of(page: httpx.Response) -> str:
    found = re.search(r'name="csrf" value="(\w+)"', page.text)
    assert found, page.text
    return found[1]


def test_without_a_session_there_is_only_the_way_in(stack: Stack) -> None:
    with stack.browser() as client:
        for path in (*PAGES, "/events"):
            answer = client.get(path)
            assert answer.status_code == 303
            assert answer.headers["location"].startswith("/login?next=/")
        assert client.post("/login", data={"token": "wrong"}).status_code == 401
        assert client.post("/pipelines/facts/retrain").status_code == 303
        token = {"token": stack.hub.token, "next": "//evil.example"}
        assert client.post("/login", data=token).headers["location"] == "/"
        foreign = {"Origin": "https://evil.example"}
        assert client.post("/login", data=token, headers=foreign).status_code == 403
        # Other clients notice nothing of the pages.
        assert client.get("/api/whoami-v2").status_code == 401
        assert client.get("/datasets/local/facts/info/refs").status_code == 401


def test_a_link_signs_in_once(stack: Stack) -> None:
    link = f"/login?once={sealed(SECRET_KEY, 'link', stack.hub.token, 'ada')}"
    with stack.browser() as first, stack.browser() as second:
        signed_in = first.get(link)
        assert signed_in.status_code == 303
        assert {"HttpOnly", "SameSite=strict"} <= {*signed_in.headers["set-cookie"].split("; ")}
        assert first.get("/jobs").status_code == 200
        cookie = next(iter(first.cookies.values()))
        # Neither again, nor as another text of the same bytes, nor is a session a link.
        for text in (link, link.replace("once=", "once=%0A"), f"/login?once={cookie}"):
            assert second.get(text).status_code == 403
        assert second.get("/jobs").status_code == 303


def test_only_who_may_write_changes_anything_and_only_by_a_form_of_the_session(
    stack: Stack,
) -> None:
    job = stack.store.submit(JobSpec(command=("true",)), by_hand=True)
    path = f"/jobs/{job.id}/cancel"
    with (
        stack.browser(stack.token("reader", "read")) as reader,
        stack.browser(stack.token("writer", "write")) as writer,
    ):
        page = reader.get(f"/jobs/{job.id}")
        assert page.status_code == 200
        assert f">Cancel {job.id}</button>" not in page.text
        assert reader.post(path, data={"csrf": csrf_of(page)}).status_code == 403
        assert writer.post(path, data={"csrf": csrf_of(page)}).status_code == 403
        assert writer.post(path).status_code == 403
        assert stack.store.get(job.id).state == "SCHEDULING"
        form = {"csrf": csrf_of(writer.get(f"/jobs/{job.id}"))}
        answer = writer.post(path, data=form)
        assert (answer.status_code, answer.headers["location"]) == (303, f"/jobs/{job.id}")
        assert stack.store.get(job.id).state == "CANCELED"
        # A command may do anything as the user of the runner.
        assert writer.post(f"/jobs/{job.id}/retry", data=form).status_code == 409
        # The token is revoked, and with it the session.
        stack.hub.request("DELETE", "/api/settings/tokens/writer")
        assert writer.get("/jobs").status_code == 303


def test_a_job_is_run_again(stack: Stack) -> None:
    job = stack.failed_job()
    with stack.browser(stack.hub.token) as client:
        form = {"csrf": csrf_of(client.get(f"/jobs/{job.id}"))}
        again = client.post(f"/jobs/{job.id}/retry", data=form).headers["location"]
        assert stack.store.get(again.removeprefix("/jobs/")).spec == job.spec
        # One job by hand may wait; the page says so.
        refused = client.post(f"/jobs/{job.id}/retry", data=form)
        assert refused.status_code == 409
        assert "j000002" in refused.text


def test_hostile_texts_are_only_text(stack: Stack) -> None:
    stack.failed_job()
    api = stack.hub.api
    api.create_repo("local/facts", repo_type="dataset")
    api.upload_file(
        path_or_fileobj=json.dumps({"question": EVIL, "answer": EVIL}).encode(),
        path_in_repo="rows.jsonl",
        repo_id="local/facts",
        repo_type="dataset",
        commit_message=EVIL,
    )
    with stack.browser(stack.hub.token) as client:
        for path in (*PAGES, f"/login?next={ODD}", f"/jobs/{ODD}", f"/jobs?state={ODD}"):
            answer = client.get(path)
            assert "<script>a" not in answer.text and "<img" not in answer.text
            assert "script-src 'self'" in answer.headers["content-security-policy"]
            assert path not in PAGES or "&lt;script&gt;" in answer.text
        page = client.get("/jobs/j000001").text
        assert (
            "99 %" in page and "1 %\r" not in page and "\x1b" not in page.partition("Log")[2][:99]
        )
        assert "hidden-value" not in page and "HIDDEN" in page
        assert "this job: 4 → 1 at step 2" in page and "step 2 of at most 9" in page
        # The page has the end of the log; the whole is a text without colours.
        assert "first\n" not in page
        log = client.get("/jobs/j000001/log")
        assert log.text.startswith("first\n") and log.text.endswith(" red\n")
        assert log.headers["content-type"].startswith("text/plain")


def test_the_stream_tells_of_changes_until_the_browser_or_the_hub_goes(tmp_path: Path) -> None:
    console = Console(home=Home(tmp_path), settings=Settings())
    with (
        JobStore.open(tmp_path / "jobs.sqlite") as store,
        httpx.Client() as client,
        ExitStack() as streams,
    ):
        with running_hub(
            console.home.hub_dir, jobs_store=store, console=create_router(console)
        ) as hub:
            client.post(f"{hub.url}/login", data={"token": hub.token})
            with client.stream("GET", f"{hub.url}/events") as first:
                seen = next(first.iter_lines()).removeprefix("id: ")
            # A page that has seen this is told again only after a change.
            url = f"{hub.url}/events?seen={seen}"
            lines = streams.enter_context(client.stream("GET", url)).iter_lines()
            store.submit(JobSpec(command=("true",)), by_hand=True)
            assert next(lines) not in ("", f"id: {seen}")
            assert next(lines) == "event: change"
        assert [line for line in lines if line] == ["data: "]
