"""A running hub, a clone to push from, and a receiver that records what it is sent.

For any test that needs the real thing: put `pytest_plugins = ["tests.hub_plugin"]` into the module
and ask for `hub`, `receiver`, `worktree`, `webhook`; or use `running_hub(...)` for other settings.
"""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
from cryptography.fernet import Fernet
from fastapi import APIRouter
from huggingface_hub import HfApi
from sqlalchemy import Connection, insert, select
from starlette.types import ASGIApp

from jobs.store import JobStore
from pipeline.hub.app import create_app
from pipeline.hub.database import open_database, read_only
from pipeline.hub.database import repositories as table
from pipeline.hub.repositories import (
    Repositories,
    Repository,
    RepositoryName,
)
from pipeline.hub.service import Elsewhere, Remarks, only_hub_in
from pipeline.hub.settings import HubSettings
from serving.http.server import Limits, Server
from tests.jobs_fixtures import until as wait_until

TOKEN = "hub-token-for-tests"
SECRET_KEY = Fernet.generate_key()


@dataclass(frozen=True, kw_only=True)
class RunningHub:
    url: str
    token: str
    root: Path
    settings: HubSettings

    @property
    def api(self) -> HfApi:
        return HfApi(endpoint=self.url, token=self.token)

    @property
    def git_env(self) -> dict[str, str]:
        return git_env(self.url, self.token)

    def git(self, *arguments: str, cwd: Path, check: bool = True) -> str:
        return run_git(*arguments, cwd=cwd, env=self.git_env, check=check)

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {self.token}", **options.pop("headers", {})}
        return httpx.request(method, f"{self.url}{path}", headers=headers, timeout=60, **options)

    def create_dataset(self, name: str) -> str:
        """Its git URL. It has no commit, so that a test can push a history of its own."""
        create_empty(self.url, name)
        return f"{self.url}/datasets/{name}"

    def folder(self, id: str, type: str = "dataset") -> Path:
        return repository_folder(self.root, id, type)

    def fsck(self) -> None:
        """git and git-lfs find nothing wrong with any repository."""
        for folder in self.root.glob("repos/*.git"):
            git = f"--git-dir={folder}"
            run_git(git, "fsck", "--strict", "--full", cwd=folder, env=self.git_env)
            if shutil.which("git-lfs") is not None and (folder / "lfs" / "objects").exists():
                run_git(git, "lfs", "fsck", cwd=folder, env=self.git_env)

    def deliveries(self, webhook_id: str) -> list[dict[str, Any]]:
        answer = self.request("GET", f"/api/settings/webhooks/{webhook_id}/deliveries")
        found: list[dict[str, Any]] = answer.json()
        return found


def repository_folder(root: Path, id: str, type: str = "dataset") -> Path:
    owner, _, name = id.partition("/")
    named = select(table.c.id).filter_by(type=type, owner=owner, name=name)
    with read_only(root) as connection:
        return root / "repos" / f"{connection.execute(named).scalar_one()}.git"


def add_row(connection: Connection, root: Path, name: RepositoryName) -> Repository:
    """A repository without a folder, for tests of what the database does."""
    kinds = {"type": name.type, "owner": name.owner, "name": name.name}
    connection.execute(insert(table).values(id="1", created_at=0, **kinds))
    return Repository(id="1", name=name, created_at=0, folder=root / "repos" / "1.git")


def create_empty(url: str, name: str) -> None:
    """Create a dataset without a first commit."""
    owner, _, short = name.partition("/")
    httpx.post(
        f"{url}/api/repos/create",
        headers={"Authorization": f"Bearer {TOKEN}"},
        json={"type": "dataset", "organization": owner, "name": short, "empty": True},
        timeout=60,
    ).raise_for_status()


def git_env(url: str, token: str) -> dict[str, str]:
    """For the real git program: the token from a helper, nothing of the user's own settings."""
    helper = '!f() { test "$1" = get && echo username=hub && echo "password=$HUB_TOKEN"; }; f'
    settings = {
        f"credential.{url}.helper": helper,
        "user.name": "Ada",
        "user.email": "ada@example.org",
        "init.defaultBranch": "main",
        "gc.auto": "0",
    }
    env = {
        "PATH": os.environ["PATH"],
        "HOME": os.devnull,
        "HUB_TOKEN": token,
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_CONFIG_COUNT": str(len(settings)),
    }
    for number, (key, value) in enumerate(settings.items()):
        env[f"GIT_CONFIG_KEY_{number}"] = key
        env[f"GIT_CONFIG_VALUE_{number}"] = value
    return env


def run_git(
    *arguments: str, cwd: Path, env: dict[str, str], check: bool = True, stdin: str = ""
) -> str:
    """What git printed, both streams; an AssertionError with it where git failed."""
    done = subprocess.run(
        ["git", *arguments],
        cwd=cwd,
        env=env,
        text=True,
        input=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=120,
    )
    assert not check or done.returncode == 0, f"git {' '.join(arguments)}:\n{done.stdout}"
    return done.stdout.strip()


def commit_file(hub: RunningHub, worktree: Path, name: str, content: str) -> str:
    """Commits one file; the sha."""
    path = worktree / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    hub.git("add", "-A", cwd=worktree)
    hub.git("commit", "-qm", f"Change {name}", cwd=worktree)
    return hub.git("rev-parse", "HEAD", cwd=worktree)


def push_file(hub: RunningHub, worktree: Path, name: str, content: str) -> str:
    """Commits one file and pushes the branch; the sha."""
    sha = commit_file(hub, worktree, name, content)
    hub.git("push", "-q", "origin", "main", cwd=worktree)
    return sha


def listening_socket(port: int = 0) -> socket.socket:
    # The protocol is named because asyncio turns Nagle's delay off only where it is.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do
    listener.bind(("127.0.0.1", port))
    return listener


@contextlib.contextmanager
def stopped_hub(root: Path) -> Iterator[Repositories]:
    """The repositories and the database of a hub that does not run."""
    with only_hub_in(root):
        database = open_database(root)
        try:
            repositories = Repositories(root.absolute(), database)
            repositories.remove_incomplete()
            yield repositories
        finally:
            database.close()


@contextlib.contextmanager
def running_hub(
    root: Path,
    *,
    jobs_store: JobStore | None = None,
    needed_commits: Callable[[], Collection[str]] = set,
    limits: Limits | None = None,
    secret_key: bytes = SECRET_KEY,
    remarks_on: Remarks = lambda *_: (),
    elsewhere: Elsewhere | None = None,
    token: str = TOKEN,
    around: Callable[[ASGIApp], ASGIApp] = lambda app: app,
    datasets: Collection[str] = (),
    pipeline_dirs: Mapping[str, Path] = MappingProxyType({}),
    console: APIRouter | None = None,
    port: int = 0,
    **settings: Any,
) -> Iterator[RunningHub]:
    """A hub in this process, on the port (0: a free one), in a thread of its own. around: an
    application that sees each request before the hub does."""
    with contextlib.ExitStack() as stack:
        if jobs_store is None:
            root.parent.mkdir(parents=True, exist_ok=True)
            own = root.with_name(f"{root.name}-jobs.sqlite")
            jobs_store = stack.enter_context(JobStore.open(own))
        listener = stack.enter_context(listening_socket(port))
        told = HubSettings(port=listener.getsockname()[1], **settings)
        app = create_app(
            told,
            root,
            token=token,
            secret_key=secret_key,
            jobs_store=jobs_store,
            jobs_dir=root.with_name("jobs"),
            needed_commits=needed_commits,
            remarks_on=remarks_on,
            elsewhere=elsewhere,
            datasets=datasets,
            pipeline_dirs=pipeline_dirs,
            console=console,
        )
        server = Server(around(app), shutdown_seconds=10, limits=limits, lifespan="on")
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            wait_until(lambda: server.started or not thread.is_alive())
            assert server.started, "the hub did not start"
            yield RunningHub(url=told.url, token=token, root=root, settings=told)
        finally:
            server.should_exit = True
            thread.join(timeout=30)


@dataclass(frozen=True, kw_only=True)
class Received:
    path: str
    headers: dict[str, str]
    """Names in lower case."""
    body: bytes
    at: float

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(kw_only=True)
class Receiver:
    url: str
    received: list[Received] = field(default_factory=list)
    answers: list[tuple[int, dict[str, str]]] = field(default_factory=list)
    """Given in turn; 200 when there are none left."""
    num_failures: int = 0
    """Attempts of each delivery that are answered 503, before any of `answers`."""
    poison: set[str] = field(default_factory=set)
    """The ids of deliveries that are always answered 503."""
    body: bytes = b'{"ok": true}'
    hang: threading.Event = field(default_factory=threading.Event)
    """While set, a request is received and not answered."""
    closing: threading.Event = field(default_factory=threading.Event)

    def next_answer(self, delivery_id: str | None) -> tuple[int, dict[str, str]]:
        ids = [one.headers.get("webhook-id") for one in self.received]
        if delivery_id in self.poison or ids.count(delivery_id) <= self.num_failures:
            return 503, {}
        return self.answers.pop(0) if self.answers else (200, {})

    def wait_for(self, count: int, *, seconds: float = 30) -> list[Received]:
        wait_until(lambda: len(self.received) >= count, seconds=seconds)
        return list(self.received)


@contextlib.contextmanager
def recording_receiver(port: int = 0) -> Iterator[Receiver]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            receiver.received.append(
                Received(
                    path=self.path,
                    headers={name.lower(): value for name, value in self.headers.items()},
                    body=body,
                    at=time.time(),
                )
            )
            while receiver.hang.is_set() and not receiver.closing.is_set():
                time.sleep(0.01)
            status, headers = receiver.next_answer(self.headers["Webhook-Id"])
            answer = receiver.body
            with contextlib.suppress(ConnectionError):
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

        def log_message(self, format: str, *args: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: Any, client_address: Any) -> None:
            pass  # a hub that was killed in the middle of a request

    server = Server(("127.0.0.1", port), Handler)
    receiver = Receiver(url=f"http://127.0.0.1:{server.server_address[1]}/webhooks/record")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield receiver
    finally:
        receiver.closing.set()
        server.shutdown()
        thread.join()
        server.server_close()
