"""Fixtures of the receiver's tests: an environment without secrets, and servers on free ports."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.types import ASGIApp

from jobs.spec import JobSpec, full_ref
from jobs.store import JobStore
from receiver import listen
from receiver.retrain import RetrainRule
from serving.http.server import Server

SECRET = {"X-Webhook-Secret": "s3cret"}


def rule(
    pipeline: str = "answers", dataset: str = "acme/answers", ref: str = "main", **values: Any
) -> RetrainRule:
    """A rule of a dataset on the stack's own hub. `values` are for the spec of the jobs."""
    spec = JobSpec(**{"command": ("train",), "pipeline": pipeline, **values})
    return RetrainRule(spec=spec, dataset=dataset, ref=full_ref(ref))


@pytest.fixture(autouse=True)
def no_secret_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WEBHOOK_SECRET", raising=False)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[JobStore]:
    with JobStore.open(tmp_path / "jobs.db") as opened:
        yield opened


@pytest.fixture
def serve() -> Iterator[Callable[[ASGIApp], str]]:
    """Serve an application over HTTP on a free port until the test ends; gives its URL."""
    with contextlib.ExitStack() as stack:

        def start(app: ASGIApp) -> str:
            listening = listen.bind("127.0.0.1", 0)
            url = listen.url_of(listening, "127.0.0.1")
            server = Server(app, shutdown_seconds=10)
            thread: threading.Thread = listen.serve_in_thread(server, listening)

            def stop() -> None:
                server.should_exit = True
                thread.join()

            stack.callback(stop)
            return url

        yield start
