"""Servers elsewhere follow a model repository: what is fetched, and what is served when `main`
moves or the hub is away."""

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import httpx
import pytest
import torch
from fastapi import FastAPI, Request, Response
from fastapi.responses import RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from pipeline.hub.routes import followers
from serving.errors import ReleaseError
from serving.follow import Follower
from serving.weights import fetch
from serving.weights.fetch import Source, fetch_release
from serving.weights.publish import publish_state_dict
from serving.weights.release import Release
from serving.weights.release_store import release_ids
from serving.weights.verify import verify_release
from tests.echo_engine import EchoEngine
from tests.hub_fixtures import TOKEN, RunningHub, running_hub
from tests.jobs_fixtures import Clock, clock
from tests.jobs_fixtures import until as wait_until
from tests.serving_fixtures import echo_app, echo_release, network_release, running, server_process

__all__ = ["clock"]

ROOT = Path(__file__).parents[2]
REPO = "local/answers"
NUM_TENSORS = 20
NUM_FLOATS = 100_000
"""Of each tensor."""


class Wire:
    """What goes from the hub to its clients, which a test may count and change."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.num_turns = 0
        self.has_ranges = True
        self.fault: Literal["cut", "flip", "hold"] | None = None
        """What happens to the content of shards; or the second one is not sent until `go_on`."""
        self.is_held = threading.Event()
        self.go_on = threading.Event()
        self._app: ASGIApp | None = None

    def around(self, app: ASGIApp) -> ASGIApp:
        self._app = app
        return self

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        self.num_turns += path.endswith("/turn")
        if "/resolve/" in path and not self.has_ranges:
            headers = [each for each in scope["headers"] if each[0] != b"range"]
            scope = {**scope, "headers": headers}

        if self.fault == "hold" and "-00002-of-" in path:
            self.is_held.set()
            await asyncio.to_thread(self.go_on.wait)

        async def pass_on(message: Any) -> None:
            body = message.get("body")
            if "/resolve/" in path and body:
                if path.endswith(".safetensors"):
                    body = self._changed(body)
                self.num_bytes += len(body)
                message = {**message, "body": body}
            await send(message)

        assert self._app is not None
        await self._app(scope, receive, pass_on)

    def _changed(self, body: bytes) -> bytes:
        match self.fault:
            case "cut":
                return body[:-1]
            case "flip":
                return body[:-1] + bytes([body[-1] ^ 1])
        return body


class SlowEngine(EchoEngine):
    """Takes no release while `go_on` is not set."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Event()
        self.go_on.set()

    async def stage(self, release: Release, folder: Path) -> None:
        await super().stage(release, folder)
        await asyncio.to_thread(self.go_on.wait, 60)


@pytest.fixture
def wire() -> Wire:
    return Wire()


@pytest.fixture
def hub(tmp_path: Path, wire: Wire) -> Iterator[RunningHub]:
    with running_hub(tmp_path / "hub", around=wire.around) as hub:
        hub.api.create_repo(REPO)
        yield hub
        wire.go_on.set()


def source(hub: RunningHub) -> Source:
    return Source(endpoint=hub.url, repo=REPO, token=hub.token)


def push(hub: RunningHub, folder: Path) -> None:
    """`main` is this release."""
    hub.api.upload_folder(repo_id=REPO, folder_path=folder, delete_patterns="*")


def large_release(pipeline_dir: Path, *changed: int) -> Path:
    """A release of four shards, of which these tensors are changed."""
    tensors = {
        f"layer.{n:02}.weight": torch.full((NUM_FLOATS,), float(n + 100 * (n in changed)))
        for n in range(NUM_TENSORS)
    }
    files = pipeline_dir.parent / "files"
    files.mkdir(exist_ok=True)
    (files / "config.json").write_text("{}")
    size = NUM_TENSORS * NUM_FLOATS
    release = publish_state_dict(pipeline_dir, tensors, files_dir=files, max_shard_bytes=size)
    return pipeline_dir / release.id


@pytest.mark.parametrize("has_ranges", [True, False])
def test_only_what_differs_is_fetched(
    hub: RunningHub, wire: Wire, tmp_path: Path, has_ranges: bool
) -> None:
    made, fetched = tmp_path / "made", tmp_path / "fetched"
    wire.has_ranges = has_ranges
    first, second = large_release(made), large_release(made, 1, 3)
    for folder in (first, second):
        push(hub, folder)
        wire.num_bytes = 0
        assert fetch_release(fetched, source(hub), "main").id == folder.name
        assert verify_release(fetched / folder.name) == ()
    if has_ranges:  # the rest is the manifest and the index
        assert 0.1 < wire.num_bytes / (NUM_TENSORS * NUM_FLOATS * 4) < 0.11
    shards = sorted(each.name for each in first.glob("*.safetensors"))
    same = [os.path.samefile(fetched / first.name / n, fetched / second.name / n) for n in shards]
    assert same == [False, True, True, True]
    wire.num_bytes = 0
    assert fetch_release(fetched, source(hub), "main").id == second.name
    assert wire.num_bytes == (second / "release.json").stat().st_size, "it was there already"


def test_a_damaged_release_damages_no_other_and_is_mended(hub: RunningHub, tmp_path: Path) -> None:
    made, fetched = tmp_path / "made", tmp_path / "fetched"
    first, second = large_release(made), large_release(made, 3)
    push(hub, first)
    fetch_release(fetched, source(hub), "main")
    for shard in (fetched / first.name).glob("*.safetensors"):
        shard.write_bytes(shard.read_bytes()[:-1] + b"!")
    damaged = verify_release(fetched / first.name)
    push(hub, second)
    fetch_release(fetched, source(hub), "main")
    assert verify_release(fetched / second.name) == ()
    assert verify_release(fetched / first.name) == damaged
    push(hub, first)
    fetch_release(fetched, source(hub), "main")
    assert verify_release(fetched / first.name) == ()
    assert not list(fetched.glob(".unfinished*"))


@pytest.mark.parametrize(("fault", "error"), [("flip", ReleaseError), ("cut", ConnectionError)])
@pytest.mark.parametrize("has_earlier", [False, True])
def test_wrong_bytes_never_become_a_release(
    hub: RunningHub,
    wire: Wire,
    tmp_path: Path,
    fault: Literal["flip", "cut"],
    error: type[Exception],
    has_earlier: bool,
) -> None:
    made, fetched = tmp_path / "made", tmp_path / "fetched"
    if has_earlier:
        push(hub, large_release(made))
        fetch_release(fetched, source(hub), "main")
    push(hub, large_release(made, 3))
    there, wire.fault = release_ids(fetched), fault
    with pytest.raises(error):
        fetch_release(fetched, source(hub), "main")
    assert release_ids(fetched) == there and not list(fetched.glob(".unfinished*"))


def test_a_redirect_to_another_host_gets_no_token() -> None:
    """The Hugging Face Hub redirects to another host for large files, and to itself for others."""
    asked = []

    app = FastAPI()

    @app.get("/{path}")
    def answer(request: Request, path: str) -> Response:
        asked.append((path, request.headers.get("Authorization")))
        there = {"a": "/b", "b": f"http://localhost:{request.url.port}/c"}.get(path)
        return RedirectResponse(there) if there else Response()

    with running(app) as url:
        fetch.open_file(Source(endpoint=url, repo=REPO, token="t"), f"{url}/a").read()
    assert asked == [("a", "Bearer t"), ("b", "Bearer t"), ("c", None)]


def test_a_fetch_that_was_killed_begins_again(hub: RunningHub, wire: Wire, tmp_path: Path) -> None:
    fetched = tmp_path / "fetched"
    push(hub, folder := large_release(tmp_path / "made"))
    wire.fault = "hold"
    command = [sys.executable, "-m", "serving.weights.fetch", str(fetched), hub.url, REPO, "main"]
    with subprocess.Popen(command, env={**os.environ, "HF_TOKEN": TOKEN}, cwd=ROOT) as process:
        assert wire.is_held.wait(30)
        process.kill()
    assert list(fetched.glob(".unfinished*")) and not release_ids(fetched)
    wire.fault = None
    wire.go_on.set()
    assert fetch_release(fetched, source(hub), "main").id == folder.name
    assert not list(fetched.glob(".unfinished*"))


def test_a_follower_looks_when_it_is_told_and_swaps_when_it_is_its_turn(
    hub: RunningHub, wire: Wire, tmp_path: Path
) -> None:
    push(hub, tmp_path / "made" / echo_release(tmp_path / "made", 1).id)
    second = echo_release(tmp_path / "made", 2).id
    follower = Follower(
        source=source(hub), seconds=3600, secret="s", name="here:1", url="http://here:1"
    )
    listing = f"/api/models/{REPO}/followers"
    reader = hub.request("POST", "/api/settings/tokens/reader").json()["token"]

    def told(route: str, **report: Any) -> Any:
        headers = {"Authorization": f"Bearer {reader}"}
        return hub.request("POST", f"{listing}{route}", json=report, headers=headers).json()

    def listed() -> dict[str, Any]:
        return {each["name"]: each for each in hub.request("GET", listing).json()}

    with running(echo_app(tmp_path / "followed", follower=follower), loop="asyncio") as url:
        wait_until(lambda: "here:1" in listed())
        assert wire.num_turns == 0, "it answered nothing before"
        wrong = {"X-Webhook-Secret": "wrong"}
        assert httpx.post(f"{url}/admin/follow", json={}, headers=wrong).status_code == 403
        hub.api.create_webhook(
            url=f"{url}/admin/follow", watched=[{"type": "model", "name": REPO}], secret="s"
        )
        for _ in range(2):
            assert told("/turn", name="other") == {"wait_seconds": 0}
        num_turns = wire.num_turns
        push(hub, tmp_path / "made" / second)
        wait_until(lambda: wire.num_turns >= num_turns + 2)
        assert httpx.get(f"{url}/health").json()["release"] != second
        told("", name="other", error="no more")
        wait_until(lambda: listed()["here:1"]["release"] == second)
        assert httpx.get(f"{url}/health").json()["release"] == second
    assert listed()["other"]["error"] == "no more"


def test_a_follower_whose_swap_takes_long_keeps_its_turn(
    hub: RunningHub, wire: Wire, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serving.follow.RENEW_SECONDS", 0.05)
    first, second = (echo_release(tmp_path / "made", seed).id for seed in (1, 2))
    push(hub, tmp_path / "made" / first)
    follower = Follower(source=source(hub), seconds=0.05, secret="s", name="a", url="http://a")
    engine = SlowEngine()
    with running(echo_app(tmp_path / "followed", engine, follower=follower), loop="asyncio") as url:
        wait_until(lambda: answers(url) == first)
        engine.go_on.clear()
        push(hub, tmp_path / "made" / second)
        wait_until(lambda: wire.num_turns >= 4)
        assert ("stage", second) in engine.log and answers(url) == first
        engine.go_on.set()
        wait_until(lambda: answers(url) == second)


def test_so_many_followers_swap_at_once_and_a_turn_that_is_not_kept_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    monkeypatch.setattr(followers, "time", SimpleNamespace(monotonic=clock))
    with running_hub(tmp_path / "hub", max_unavailable=2) as hub:
        hub.api.create_repo(REPO)

        def may_swap(name: str) -> bool:
            path = f"/api/models/{REPO}/followers/turn"
            answer = hub.request("POST", path, json={"name": name}).json()
            assert answer["wait_seconds"] in (0, followers.WAIT_SECONDS)
            return not answer["wait_seconds"]

        assert [may_swap(name) for name in "abcb"] == [True, True, False, True]
        clock.now += followers.TURN_SECONDS - 1
        assert [may_swap(name) for name in "ac"] == [True, False]
        clock.now += 1
        assert [may_swap(name) for name in "cba"] == [True, False, True]


def answers(url: str) -> str | None:
    """The release that answers now."""
    with suppress(httpx.TransportError):
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": "Hi", "max_tokens": 2})
        return str(answer.json().get("system_fingerprint"))
    return None


def test_a_server_elsewhere_serves_what_main_is(hub: RunningHub, tmp_path: Path) -> None:
    home, made = tmp_path / "home", tmp_path / "made"
    home.mkdir()
    first, second = network_release(made, 1).id, network_release(made, 2).id
    push(hub, made / first)
    told = {
        "PIPELINE_SERVING__PORT": "1",  # which port 0 is not
        "PYTHONPATH": str(ROOT),
        "HF_TOKEN": TOKEN,
        "PIPELINE_HOME": str(home),
        "PIPELINE_SETTINGS": str(home / "pipeline.toml"),
        "PIPELINE_SERVING__FOLLOW_SECONDS": "0.2",
    }
    options = ["--follow", REPO, "--endpoint", hub.url, "--engine", "torch", "--port", "0"]
    command = ("-m", "pipeline", "serve", *options)
    with server_process(*command, env={**os.environ, **told}) as (url, _):
        assert not url.endswith(":1")
        # Only a safety net: the server computes for some seconds, of which most import torch. Asked
        # more often, this process would take the core that the server and the hub need.
        wait_until(lambda: answers(url) == first, seconds=120, every_seconds=0.1)
        push(hub, made / second)
        wait_until(lambda: answers(url) == second, every_seconds=0.1)


def test_while_the_hub_is_away_what_was_fetched_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    release, followed = echo_release(tmp_path / "made", 1).id, tmp_path / "followed"
    looks: list[str | None] = []
    log = Follower._log

    def look(follower: Follower, problem: str | None) -> None:
        looks.append(problem)
        log(follower, problem)

    def app() -> FastAPI:
        follower = Follower(source=source(hub), seconds=0.05, secret="s", name="a", url="http://a")
        return echo_app(followed, follower=follower)

    monkeypatch.setattr(Follower, "_log", look)
    with running_hub(tmp_path / "hub") as hub:
        hub.api.create_repo(REPO)
        push(hub, tmp_path / "made" / release)
        with running(app(), loop="asyncio") as url:
            wait_until(lambda: answers(url) == release)
    looks.clear()
    with running(app(), loop="asyncio") as url:
        wait_until(lambda: len(looks) > 2)
        assert answers(url) == release
    assert caplog.text.count("does not answer") == 1, "it is not said at each look"
