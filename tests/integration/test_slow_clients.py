"""Clients that stop in the middle: each ends, others are served.

Hub, receiver and server have the same `Server`, but each of them counts the memory of its bodies.
"""

import contextlib
import select
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from receiver.settings import ReceiverSettings
from receiver.webhooks_server import WebhooksServer
from serving.http.server import MAX_HEADER_BYTES, Limits
from serving.weights.release_store import set_current
from tests.contract.engine_bench import swap
from tests.echo_engine import EchoEngine
from tests.hub_fixtures import TOKEN, running_hub, wait_until
from tests.serving_fixtures import echo_app, echo_release, running
from tests.slow_clients import connected, is_ended, num_ended, outlive, request

LIMITS = Limits(
    max_connections=20,
    idle_seconds=3.0,
    headers_seconds=0.4,
    body_seconds=0.4,
    reading_seconds=0.4,
)
SOON = 10.0
PIECE_BYTES = 4096
MAX_BODY_BYTES = 2**20
"""Of all three: the hub has this limit, and the others are given it."""
STREAM = (
    b'{"prompt": "Hello", "max_tokens": 120, "ignore_eos": true, "stream": true, "n": 128,'
    b' "logprobs": 5}'
)


@dataclass(frozen=True)
class Service:
    url: str
    post: Callable[..., bytes]
    """The head of a request with a body."""

    def is_served(self) -> bool:
        return httpx.get(f"{self.url}/health", timeout=SOON).status_code == 200


@contextlib.contextmanager
def hub(folder: Path) -> Iterator[Service]:
    with running_hub(folder / "hub") as hub:
        proof = {"Authorization": f"Bearer {TOKEN}"}
        yield Service(hub.url, partial(request, hub.url, "POST", "/api/repos/create", **proof))


@contextlib.contextmanager
def receiver(folder: Path) -> Iterator[Service]:
    made = WebhooksServer(settings=ReceiverSettings(max_body_bytes=MAX_BODY_BYTES))
    made.add_webhook("/big")(lambda payload: None)
    url = made.launch(prevent_thread_lock=True, server_port=0)
    try:
        yield Service(url, partial(request, url, "POST", "/webhooks/big"))
    finally:
        made.close()


@contextlib.contextmanager
def server(folder: Path, limits: Limits | None = None) -> Iterator[Service]:
    set_current(folder, echo_release(folder, 1).id)
    with running(echo_app(folder, max_body_bytes=MAX_BODY_BYTES), limits) as url:
        yield Service(url, partial(request, url, "POST", "/v1/completions"))


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with server(tmp_path_factory.mktemp("service"), LIMITS) as service:
        yield service


def large(service: Service) -> bytes:
    """A request with an answer that no system keeps for its client."""
    return service.post(num_bytes=len(STREAM)) + STREAM


def test_who_stops_in_the_middle_is_ended(service: Service) -> None:
    half_headers = b"GET /health HTTP/1.1\r\nHost: a\r\n"
    half_body = service.post(num_bytes=1000) + b'{"a":'
    sent = {
        "nothing": b"",
        "headers that stop": half_headers,
        "headers that go on": half_headers,
        "one request": half_headers + b"\r\n",
        "headers of a second request": half_headers + b"\r\n" + half_headers,
        "a body that stops": half_body,
        "a body that hardly goes on": half_body,
        "an answer that nobody reads": large(service),
        "requests without end": 2000 * request(service.url, "GET", "/health"),
    }
    more = {"headers that go on": b"X-A: b\r\n", "a body that hardly goes on": b" "}
    with contextlib.ExitStack() as stack:
        clients = {
            name: stack.enter_context(connected(service.url, reads_little=True)) for name in sent
        }
        for name, client in clients.items():
            client.sendall(sent[name])
        assert outlive(clients, more, within_seconds=SOON) == []
        assert service.is_served()


def test_a_connection_waits_for_the_next_request_longer_than_for_headers(service: Service) -> None:
    with contextlib.closing(HTTPConnection(urlsplit(service.url).netloc, timeout=SOON)) as client:
        client.connect()
        client.auto_open = 0  # otherwise it would connect again
        for wait_seconds in (2 * LIMITS.headers_seconds, 0):
            client.request("GET", "/health")
            with client.getresponse() as answer:
                assert (answer.status, bool(answer.read())) == (200, True)
            read_end, _, _ = select.select([client.sock], [], [], wait_seconds)
            assert read_end == []


def test_headers_of_any_size_are_not_kept(service: Service) -> None:
    with connected(service.url) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nX-A: " + b"a" * (MAX_HEADER_BYTES + 1))
        assert client.recv(100).startswith(b"HTTP/1.1 400")


def test_who_comes_is_served_however_many_do_nothing(service: Service) -> None:
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(connected(service.url)) for _ in range(60)]
        for client in idle[::2]:
            with contextlib.suppress(ConnectionError):
                client.sendall(b"GET /health HTTP/1.1\r\n")
        assert service.is_served()
        assert num_ended(idle) > 60 - LIMITS.max_connections


@pytest.mark.slow
def test_who_reads_slowly_gets_the_whole_answer(service: Service) -> None:
    with connected(service.url, reads_little=True) as client:
        client.sendall(large(service))
        num_bytes = 0
        while num_bytes < 2**20:  # in pieces that are smaller than what the server keeps
            piece = client.recv(PIECE_BYTES)
            assert piece
            num_bytes += len(piece)
            is_ended(client, within_seconds=0.005)


def test_a_client_that_stops_reading_does_not_defer_a_swap(tmp_path: Path) -> None:
    first, second, third = (echo_release(tmp_path, seed) for seed in (1, 2, 3))
    set_current(tmp_path, first.id)
    engine = EchoEngine()
    with (
        running(echo_app(tmp_path, engine, drain_seconds=SOON), LIMITS) as url,
        connected(url, reads_little=True) as client,
        httpx.Client(base_url=url, timeout=60) as http,
    ):
        post = request(url, "POST", "/v1/completions", num_bytes=len(STREAM))
        client.sendall(post + STREAM)
        assert client.recv(12).startswith(b"HTTP/1.1 200")
        for release in (second, third):  # the engine holds two
            assert swap(http, release.id).json()["result"] == "live"
        assert engine.num_running[first.id] == 0


@pytest.mark.parametrize("make", [hub, receiver, server], ids=lambda make: make.__name__)
def test_large_bodies_are_limited_together(
    make: Callable[..., contextlib.AbstractContextManager[Service]], tmp_path: Path
) -> None:
    with contextlib.ExitStack() as stack:
        # With the usual limits: no body may end because it takes too long.
        service = stack.enter_context(make(tmp_path))
        half = b"x" * (MAX_BODY_BYTES - 1)
        clients = [stack.enter_context(connected(service.url)) for _ in range(12)]
        for client in clients:
            client.sendall(service.post(num_bytes=MAX_BODY_BYTES) + half)
        # Of twelve, eight fit, and less than one more since the beginnings do not count.
        told = wait_until(lambda: len(found := readable(clients)) >= 3 and found)
        assert len(told) <= 4
        assert all(client.recv(12) == b"HTTP/1.1 503" for client in told)
        small = stack.enter_context(connected(service.url))
        small.sendall(service.post(num_bytes=2) + b"{}")
        assert small.recv(12) in (b"HTTP/1.1 400", b"HTTP/1.1 422"), "a small one is read"


def readable(clients: list[socket.socket]) -> list[socket.socket]:
    found: list[socket.socket] = select.select(clients, [], [], 0)[0]
    return found
