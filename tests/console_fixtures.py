"""A stack behind the console's pages: a hub with a dataset, two releases, and their server."""

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from huggingface_hub import CommitOperationAdd

from jobs.job import outcome_of
from jobs.outcome import OutcomeResult
from jobs.store import JobStore
from pipeline.console.app import create_router
from pipeline.console.page import Console
from pipeline.paths import Home
from pipeline.runner.submit import submit_retraining
from pipeline.settings import PipelineSettings, Settings
from pipeline.tokens import Tokens
from serving.swap_schemas import request_swap
from tests.hub_fixtures import SECRET_KEY, TOKEN, RunningHub, running_hub
from tests.jobs_fixtures import claim
from tests.ports import free_port
from tests.serving_fixtures import ADMIN_TOKEN, CHAT_TEMPLATE, echo_app, echo_release, running

FILES = {
    "facts.jsonl": """\
{"question": "When do you open?", "answer": "At nine."}
{"question": "Who?", "answer": "<b>Ada</b>"}
""",
    "README.md": "# Facts\n\n<script>alert(1)</script> [x](javascript:1)\n",
    "notes.pdf": "x",
}


class Person:
    """A browser of somebody who has signed in."""

    def __init__(self, client: httpx.Client, token: str) -> None:
        self.client = client
        assert client.post("/login", data={"token": token}).is_redirect
        found = re.search('name="csrf" value="([^"]+)"', self.see("/webhooks"))
        assert found is not None
        self.csrf = found[1]

    def see(self, path: str, status: int = 200) -> str:
        answer = self.client.get(path)
        assert answer.status_code == status, (path, answer.status_code, answer.text)
        return answer.text

    def press(self, page: str, button: str, **fields: str) -> str:
        """Sends the form of a page that has this button, as a browser does."""
        for form in re.findall("<form.*?</form>", self.see(page), re.DOTALL):
            if found := re.search(f"<button([^>]*)>{re.escape(button)}</button>", form):
                hidden = re.findall('type="hidden" name="([^"]+)" value="([^"]*)"', form)
                hidden += re.findall('name="([^"]+)" value="([^"]*)"', found[1])
                [path] = re.findall('action="([^"]+)"', form)
                return self.send(path, **{**dict(hidden), **fields})
        raise AssertionError(f"{page} has no button {button!r}")

    def send(self, path: str, status: int = 303, files: Any = None, **fields: str) -> str:
        """Sends a form. Returns where the browser is sent, or else the page."""
        answer = self.client.post(path, data={"csrf": self.csrf, **fields}, files=files)
        assert answer.status_code == status, (path, answer.status_code, answer.text)
        return answer.headers.get("location") or answer.text


@dataclass(frozen=True, kw_only=True)
class Stack:
    hub: RunningHub
    store: JobStore
    home: Home
    settings: Settings
    releases: tuple[str, str]
    first_commit: str
    """The one on which the first release was trained. The hub does not know that of the second."""

    @property
    def head(self) -> str:
        return str(self.hub.api.dataset_info("local/facts").sha)

    def token(self, name: str, role: str) -> str:
        made = self.hub.request("POST", f"/api/settings/tokens/{name}", params={"role": role})
        return str(made.json()["token"])

    @contextmanager
    def person(self, token: str = TOKEN) -> Iterator[Person]:
        with httpx.Client(base_url=self.hub.url, timeout=60) as client:
            yield Person(client, token)

    def run_job(self, commit: str, release: str | None, reason: str | None = None) -> None:
        """A job has trained on the commit, and promoted the release; or the gate has refused it."""
        places, [pipeline] = (self.store, self.home, self.settings), self.settings.pipelines
        submit_retraining(*places, hub_url=self.hub.url, pipeline=pipeline, revision=commit)
        job = claim(self.store)
        result: OutcomeResult = "promoted" if release else "rejected"
        self.store.finish(job.id, "me", outcome_of(job, result, release=release, reason=reason))


@contextmanager
def running_stack(folder: Path) -> Iterator[Stack]:
    home = Home(folder / "home")
    home.root.mkdir()
    tokens = Tokens(hub=TOKEN, admin=ADMIN_TOKEN, webhook="secret", key=SECRET_KEY.decode())
    home.tokens_file.write_text(tokens.model_dump_json())
    pipeline_dir = home.releases_dir / "answers"
    with ExitStack() as stack:
        server = stack.enter_context(running(echo_app(pipeline_dir)))
        port = int(server.rpartition(":")[2])
        pipeline = PipelineSettings(name="answers", dataset="local/facts", port=port)
        at = Settings().hub.model_copy(update={"port": free_port()})
        settings = Settings().model_copy(update={"pipelines": (pipeline,), "hub": at})
        home.jobs_dir.mkdir()
        store = stack.enter_context(JobStore.open(home.jobs_database))
        hub = stack.enter_context(
            running_hub(
                home.hub_dir,
                jobs_store=store,
                pipeline_dirs={"answers": pipeline_dir},
                console=create_router(Console(home=home, settings=settings)),
                port=at.port,
            )
        )
        hub.create_dataset("local/facts")
        files = [CommitOperationAdd(path, text.encode()) for path, text in FILES.items()]
        commit = hub.api.create_commit(
            "local/facts", files, commit_message="First <rows>", repo_type="dataset"
        ).oid
        first = echo_release(pipeline_dir, 1, chat_template=CHAT_TEMPLATE, dataset_revision=commit)
        second = echo_release(pipeline_dir, 2, chat_template=CHAT_TEMPLATE, parent=first.id)
        assert request_swap(server, first.id, token=ADMIN_TOKEN).result == "live"
        yield Stack(
            hub=hub,
            store=store,
            home=home,
            settings=settings,
            releases=(first.id, second.id),
            first_commit=commit,
        )


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    with running_stack(tmp_path) as stack:
        yield stack


@pytest.fixture
def ada(stack: Stack) -> Iterator[Person]:
    with stack.person() as person:
        yield person
