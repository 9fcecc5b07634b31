"""What befalls a stack beside signals: damaged files, a full disk, poison, clients that stall."""

import contextlib
import itertools
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from huggingface_hub import HfApi

from serving.weights.release_store import served_release
from tests.soak.stack import StackUnderFire

DAMAGES = ("short shard", "lost manifest", "lost tokens")
"""Of files, before the commits of a round."""
STALLED = {"half headers": 20, "half body": 20, "unread answers": 2, "unread clones": 12}
"""Clients that stay connected for a whole round, and the number of them at each service."""
POISON = (False, False, False, True, True)
"""In turn, which events fail for ever at the other receiver. Two of them one after the other
suspend its webhook."""


def damage(stack: StackUnderFire, what: str) -> None:
    """Do it, and kill who must then find out.

    A release is damaged only where another one was live before it.
    """
    if what == "lost tokens":
        stack.workplace.home.joinpath("tokens.json").unlink()
        stack.kill("all")
        stack.forget_tokens()
        stack.start()
        stack.counts["damages"] += 1
        return
    served = served_release(stack.releases_dir)
    whole = [folder for folder in stack.whole_releases() if served and folder.name < served.name]
    if served is None or not whole:
        return
    stack.damaged.add(served.name)
    if what == "lost manifest":
        (served / "release.json").unlink()
    else:
        shard = min(served.glob("*.safetensors"))
        shard.chmod(0o644)
        with shard.open("r+b") as file:
            file.truncate(shard.stat().st_size // 2)
    stack.kill("serve")
    stack.counts["damages"] += 1


@contextmanager
def stalled(stack: StackUnderFire, what: str | None) -> Iterator[None]:
    """Connections of clients that say half of something, or read nothing, while the block runs."""
    with ExitStack() as opened:
        for _ in range(STALLED[what] if what is not None else 0):
            for service, text in _said(stack, str(what)).items():
                port = int(stack.workplace.env[f"PIPELINE_{service}__PORT"])
                # A service that was just killed refuses: then there is one client less.
                with contextlib.suppress(OSError):
                    client = opened.enter_context(socket.socket())
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
                    client.settimeout(5)
                    client.connect(("127.0.0.1", port))
                    client.sendall(text.encode())
                    if what == "unread clones":
                        assert client.recv(12) == b"HTTP/1.1 200"
                    stack.counts["stalled clients"] += 1
        yield


def _said(stack: StackUnderFire, what: str) -> dict[str, str]:
    """What such a client sends, by service."""
    host = "Host: 127.0.0.1\r\n"
    if what == "half headers":
        return dict.fromkeys(("HUB", "RECEIVER", "SERVING"), f"POST / HTTP/1.1\r\n{host}X-Half: ")
    if what == "half body":
        begun = f"{host}Content-Type: application/json\r\nContent-Length: 100000\r\n\r\n" + '{"a": '
        paths = {"RECEIVER": "/webhooks/retrain", "SERVING": "/v1/completions"}
        said = {service: f"POST {path} HTTP/1.1\r\n{begun}" for service, path in paths.items()}
        return said | {"HUB": _git_post(stack, "git-receive-pack", 100_000) + "0" * 50_000}
    if what == "unread answers":
        body = json.dumps(
            {"model": "facts", "prompt": "Shelf", "max_tokens": 100, "ignore_eos": True}
            | {"n": 64, "logprobs": 5, "stream": True}
        )
        head = f"{host}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        return {"SERVING": f"POST /v1/completions HTTP/1.1\r\n{head}{body}"}
    want = f"0032want {stack.noise_sha}\n00000009done\n"
    return {"HUB": _git_post(stack, "git-upload-pack", len(want)) + want}


def _git_post(stack: StackUnderFire, service: str, num_bytes: int) -> str:
    return (
        f"POST /datasets/local/facts/{service} HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        f"Authorization: {stack.authorization()}\r\n"
        f"Content-Type: application/x-{service}-request\r\nContent-Length: {num_bytes}\r\n\r\n"
    )


class OtherReceiver:
    """A second webhook of the same dataset, for which some events are poison: it answers them with
    500, for ever, and the others with 200."""

    def __init__(self, stack: StackUnderFire) -> None:
        self.answered: set[str] = set()
        """The commits of events that were answered well."""
        self.is_poison: dict[str, bool] = {}
        lock, counter = threading.Lock(), itertools.count()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(handler) -> None:
                body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
                sha = body["updatedRefs"][0]["newSha"]
                with lock:
                    if sha not in self.is_poison:
                        self.is_poison[sha] = POISON[next(counter) % len(POISON)]
                    if not self.is_poison[sha]:
                        self.answered.add(sha)
                handler.send_response(500 if self.is_poison[sha] else 200)
                handler.send_header("Content-Length", "0")
                handler.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        api = HfApi(endpoint=stack.workplace.url("hub"), token=stack.token())
        url = f"http://127.0.0.1:{self._server.server_address[1]}/poison"
        watched = [{"type": "dataset", "name": "local/facts"}]
        self.webhook_id = api.create_webhook(url=url, watched=watched, domains=["repo"]).id

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
