"""A stack behind the console's pages: a hub with a dataset, two releases, and their server."""

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
from huggingface_hub import CommitOperationAdd

from jobs.job import Job, outcome_of
from jobs.store import JobStore
from pipeline.console.app import create_router
from pipeline.console.page import Console
from pipeline.doctor.push_remarks import PushRemarks
from pipeline.paths import Home
from pipeline.runner.submit import submit_retraining
from pipeline.settings import PipelineSettings, Settings
from pipeline.tokens import Tokens
from serving.swap_schemas import request_swap
from tests.hub_fixtures import SECRET_KEY, TOKEN, RunningHub, running_hub
from tests.jobs_fixtures import claim
from tests.serving_fixtures import ADMIN_TOKEN, CHAT_TEMPLATE, echo_app, echo_release, running

ROWS = """\
{"question": "When do you open?", "answer": "At nine."}
{"question": "Who?", "answer": "<b>Ada</b>"}
"""
README = "# Facts\n\n<script>alert(1)</script> [x](javascript:1)\n"


@dataclass(frozen=True, kw_only=True)
class Person:
    """A browser of somebody who has signed in."""

    client: httpx.Client

    def see(self, path: str, status: int = 200) -> str:
        answer = self.client.get(path)
        assert answer.status_code == status, (path, answer.status_code, answer.text)
        return answer.text

    def send(self, path: str, status: int = 303, **options: object) -> httpx.Response:
        """Sends a form, with the token that the pages of this person have."""
        fields = {"csrf": self.csrf, **options.pop("data", {})}  # type: ignore[dict-item]
        answer = self.client.post(path, data=fields, **options)  # type: ignore[arg-type]
        assert answer.status_code == status, (path, answer.status_code, answer.text)
        return answer

    @property
    def csrf(self) -> str:
        found = re.search('name="csrf" value="([^"]+)"', self.see("/webhooks"))
        assert found is not None
        return found[1]


@dataclass(frozen=True, kw_only=True)
class Stack:
    hub: RunningHub
    store: JobStore
    home: Home
    settings: Settings
    releases_dir: Path
    releases: tuple[str, str]
    head: str

    @contextlib.contextmanager
    def person(self, token: str) -> Iterator[Person]:
        with httpx.Client(base_url=self.hub.url, timeout=60) as client:
            assert client.post("/login", data={"token": token}).is_redirect
            yield Person(client=client)

    def run_job(self, commit: str, release: str) -> Job:
        """A job that has trained on the commit, and promoted the release."""
        pipeline = self.settings.pipelines[0]
        submit_retraining(
            self.store,
            self.home,
            self.settings,
            hub_url=self.hub.url,
            pipeline=pipeline,
            revision=commit,
        )
        job = claim(self.store)
        outcome = outcome_of(job, "promoted", release=release)
        return self.store.finish(job.id, "me", outcome)


@contextlib.contextmanager
def running_stack(folder: Path) -> Iterator[Stack]:
    home = Home(folder / "home")
    home.root.mkdir()
    tokens = Tokens(hub=TOKEN, admin=ADMIN_TOKEN, webhook="secret", key=SECRET_KEY.decode())
    home.tokens_file.write_text(tokens.model_dump_json())
    releases_dir = home.releases_dir / "answers"
    with contextlib.ExitStack() as stack:
        server_url = stack.enter_context(running(echo_app(releases_dir)))
        port = int(server_url.rpartition(":")[2])
        pipeline = PipelineSettings(name="answers", dataset="local/facts", port=port)
        settings = Settings().model_copy(update={"pipelines": (pipeline,)})
        store = stack.enter_context(JobStore.open(folder / "jobs.sqlite"))
        hub = stack.enter_context(
            running_hub(
                folder / "hub",
                jobs_store=store,
                remarks_on=PushRemarks([pipeline], home),
                pipeline_dirs={"answers": releases_dir},
                console=create_router(Console(home=home, settings=settings)),
            )
        )
        hub.create_dataset("local/facts")
        files = {"facts.jsonl": ROWS, "README.md": README, "notes.pdf": "x"}
        head = hub.api.create_commit(
            "local/facts",
            [CommitOperationAdd(path, text.encode()) for path, text in files.items()],
            commit_message="First <rows>",
            repo_type="dataset",
        ).oid
        first = echo_release(releases_dir, 1, chat_template=CHAT_TEMPLATE, dataset_revision=head)
        second = echo_release(releases_dir, 2, chat_template=CHAT_TEMPLATE, parent=first.id)
        assert request_swap(server_url, first.id, admin_token=ADMIN_TOKEN).result == "live"
        yield Stack(
            hub=hub,
            store=store,
            home=home,
            settings=settings,
            releases_dir=releases_dir,
            releases=(first.id, second.id),
            head=head,
        )
