"""A receiver with a public URL: through a tunnel's command, and when the URL changes."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from receiver.errors import OpenToEveryone, TunnelFailed
from receiver.payload import WebhookPayload
from receiver.settings import ReceiverSettings
from receiver.tunnel import HubCredentials, PublicUrl, move_webhooks, remember, remembered_urls
from receiver.webhooks import create_webhook, get_webhook
from receiver.webhooks_server import WebhooksServer
from tests.hub_fixtures import RunningHub, wait_until
from tests.receiver_fixtures import no_secret_in_the_environment  # noqa: F401
from tests.receiver_payloads import dataset_update
from tests.receiver_scripts import FORWARDER_URL, ROOT, forwarder

pytest_plugins = ["tests.hub_plugin"]

SECRET = {"X-Webhook-Secret": "s3cret"}

# Says another URL each time that it is started, in lines such as relays print, and then is silent.
RELAY = """
import sys, time
from pathlib import Path
starts = Path(sys.argv[1])
starts.open("a").write("x")
print("Welcome! Documentation: http://docs.example/", flush=True)
print(f"tunneled with tls termination, https://n{starts.stat().st_size}.relay.example", flush=True)
time.sleep(600)
"""


def server_in(folder: Path, *, hub: RunningHub | None = None, **settings: Any) -> WebhooksServer:
    told = ReceiverSettings(port=0, **settings)
    hubs = [] if hub is None else [HubCredentials(endpoint=hub.url, token=hub.token)]
    server = WebhooksServer(webhook_secret="s3cret", settings=told, hubs=hubs, state_dir=folder)

    @server.add_webhook
    def hello(payload: WebhookPayload) -> str:
        return payload.repo.name

    return server


@pytest.fixture
def relay(tmp_path: Path) -> str:
    """A tunnel command."""
    (tmp_path / "relay.py").write_text(RELAY)
    return shlex.join([sys.executable, f"{tmp_path}/relay.py", f"{tmp_path}/starts"])


@pytest.fixture
def closing() -> Iterator[list[WebhooksServer]]:
    servers: list[WebhooksServer] = []
    yield servers
    for server in servers:
        server.close()


def call(url: str, headers: dict[str, str] = SECRET) -> int:
    return httpx.post(
        f"{url}/webhooks/hello", json=dataset_update(), headers=headers, trust_env=False
    ).status_code


def commands_with(text: str) -> list[int]:
    """Processes that have `text` among their arguments."""
    found = []
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            arguments = process.read_bytes().decode(errors="replace")
        except OSError:
            continue
        if text in arguments:
            found.append(int(process.parent.name))
    return found


def test_a_url_that_comes_back(
    tmp_path: Path, closing: list[WebhooksServer], capsys: pytest.CaptureFixture[str]
) -> None:
    server = server_in(tmp_path, tunnel_url_pattern=FORWARDER_URL)
    closing.append(server)
    url = server.launch(prevent_thread_lock=True, share=forwarder(tmp_path))
    printed = capsys.readouterr().out
    assert f"  - POST {url}/webhooks/hello" in printed
    assert (call(url), call(url, {})) == (200, 401)
    page = re.search(r"Open (http://127\.0\.0\.1:\d+)/ to see", printed)
    assert page is not None
    assert f"--url {url}/webhooks/hello" in httpx.get(page[1], trust_env=False).text
    here = {"Host": page[1].removeprefix("http://")}  # strangers choose what they send
    for path in ("/", "/docs", "/openapi.json", "/health", "/webhooks/hello"):
        for headers in ({}, here):
            got = httpx.get(f"{url}{path}", headers=headers, trust_env=False)
            assert (got.status_code, got.json()) == (404, {"error": "Not Found"}), path

    [process] = commands_with(f"{tmp_path}/forwarder.py")
    os.kill(process, signal.SIGKILL)

    def is_back() -> bool:
        try:
            return call(json.loads(remembered.read_text())[0]) == 200
        except httpx.TransportError:
            return False

    [remembered] = tmp_path.glob("receiver-urls-*.json")
    wait_until(is_back, every_seconds=0.1)
    server.close()
    assert not is_back()
    assert commands_with(f"{tmp_path}/forwarder.py") == []


def test_when_the_url_changes_webhooks_are_moved(
    hub: RunningHub, tmp_path: Path, relay: str, closing: list[WebhooksServer]
) -> None:
    server = server_in(tmp_path, hub=hub, tunnel_url_pattern=r"https://\w+\.relay\.example")
    closing.append(server)
    url = server.launch(prevent_thread_lock=True, share=relay)
    assert url == "https://n1.relay.example"
    at = {"endpoint": hub.url, "token": hub.token}
    ours = create_webhook(url=f"{url}/webhooks/hello", watched=["user:local"], **at)
    others = create_webhook(url="https://n1.relay.example.org/x", watched=["user:local"], **at)

    def is_at(expected: str) -> bool:
        return get_webhook(ours.id, **at).url == f"{expected}/webhooks/hello"

    [process] = commands_with(f"{tmp_path}/starts")
    os.kill(process, signal.SIGKILL)
    wait_until(lambda: is_at("https://n2.relay.example"))
    assert get_webhook(ours.id, **at).watched == ours.watched
    assert get_webhook(others.id, **at).url == others.url

    # Another process, and so another URL.
    server.close()
    again = server_in(tmp_path, hub=hub, tunnel_url_pattern=r"https://\w+\.relay\.example")
    closing.append(again)
    assert again.launch(prevent_thread_lock=True, share=relay) == "https://n3.relay.example"
    wait_until(lambda: is_at("https://n3.relay.example"))


def test_a_public_url_that_is_kept_up_elsewhere_moves_webhooks_too(
    hub: RunningHub,
    tmp_path: Path,
    closing: list[WebhooksServer],
    capsys: pytest.CaptureFixture[str],
) -> None:
    at = {"endpoint": hub.url, "token": hub.token}
    ours = create_webhook(url="https://a.example/webhooks/hello", watched=["user:local"], **at)
    for public_url in ("https://a.example/", "https://b.example"):
        server = server_in(tmp_path, hub=hub, public_url=public_url)
        closing.append(server)
        assert server.launch(prevent_thread_lock=True) == public_url.rstrip("/")
        expected = f"{public_url.rstrip('/')}/webhooks/hello"
        printed = capsys.readouterr().out
        assert f"POST {expected}" in printed and "Open http://127.0.0.1:" in printed
        wait_until(lambda: get_webhook(ours.id, **at).url == expected)  # noqa: B023
        server.close()


def test_a_hub_that_is_down_is_asked_again(hub: RunningHub, tmp_path: Path) -> None:
    urls = tmp_path / "urls.json"
    at = {"endpoint": hub.url, "token": hub.token}
    ours = create_webhook(url="https://a.example/webhooks/x", watched=["user:local"], **at)
    down = HubCredentials(endpoint="http://127.0.0.1:1", token="t")
    up = HubCredentials(**at)
    remember("https://a.example", urls)
    assert move_webhooks(urls, [down]), "there is nothing to move"
    remember("https://b.example", urls)
    assert not move_webhooks(urls, [up, down])
    assert get_webhook(ours.id, **at).url == "https://b.example/webhooks/x"
    assert json.loads(urls.read_text()) == ["https://b.example", "https://a.example"]
    draft = urls.with_name(f".{urls.name}.{os.getpid()}")
    draft.mkdir()
    assert not move_webhooks(urls, [up]), "the file cannot be written"
    draft.rmdir()
    stranger = HubCredentials(endpoint=hub.url, token="wrong")
    assert move_webhooks(urls, [up, stranger]), "never will be"
    assert json.loads(urls.read_text()) == ["https://b.example"]
    for damaged in ("{", "null", "{}", ""):
        urls.write_text(damaged)
        remember("https://c.example", urls)
        assert move_webhooks(urls, [up])
        assert json.loads(urls.read_text()) == ["https://c.example"]


def test_receivers_of_one_folder_keep_their_own_urls(tmp_path: Path) -> None:
    assert len({remembered_urls(tmp_path, port) for port in (7860, 7861)}) == 2


@pytest.mark.parametrize(
    ("share", "reason"),
    [
        (True, r"pass as `share` a command.*`tunnel`.*--tunnel.*--public-url"),
        ("", "is empty"),
        ("'unclosed", "is not a command"),
        ("no-such-program --url {address}", "'no-such-program' is not on PATH"),
        ("sh -c 'echo quota exceeded for port {port}; exit 1'", "quota exceeded for port "),
    ],
)
def test_a_tunnel_that_cannot_be(
    tmp_path: Path, share: bool | str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    server = server_in(tmp_path)
    with pytest.raises(TunnelFailed, match=reason):
        server.launch(prevent_thread_lock=True, share=share)
    assert capsys.readouterr().out == "", "nothing was started"
    server.close()


def test_no_public_url_without_a_secret(tmp_path: Path, relay: str) -> None:
    server = WebhooksServer(settings=ReceiverSettings(port=0))
    server.add_webhook("/proven", webhook_secret="x")(lambda payload: None)
    server.add_webhook("/open")(lambda payload: None)
    with pytest.raises(OpenToEveryone, match="no secret for /webhooks/open"):
        server.launch(prevent_thread_lock=True, share=relay)
    assert not (tmp_path / "starts").exists()

    public = WebhooksServer(settings=ReceiverSettings(port=0, public_url="https://x.example"))
    public.add_webhook("/open")(lambda payload: None)
    with pytest.raises(OpenToEveryone, match="Everyone can reach a public URL"):
        public.launch(prevent_thread_lock=True)


def test_a_tunnel_ends_with_what_its_command_has_started(tmp_path: Path) -> None:
    """A child that keeps the output open, and that does not end at SIGTERM."""
    child = f"trap '' TERM; while true; do sleep 1; done; true {tmp_path}"
    starting = f"sh -c {shlex.quote(child)} & echo https://a.example; wait"
    command = shlex.join(["sh", "-c", starting])
    urls = tmp_path / "urls.json"
    tunnel = PublicUrl(ReceiverSettings(), urls, [], tunnel=command, address="h:1")
    tunnel.open()
    assert tunnel.url == "https://a.example"
    tunnel.close()
    wait_until(lambda: commands_with(str(tmp_path)) == [])


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the tunnel's process stays")
def test_the_command_opens_a_tunnel_that_ends_with_it(tmp_path: Path, relay: str) -> None:
    env = {
        **os.environ,
        "PIPELINE_HOME": str(tmp_path / ".pipeline"),
        "PIPELINE_SETTINGS": str(tmp_path / "pipeline.toml"),
        "PIPELINE_HUB__PORT": "1",
        "PIPELINE_RECEIVER__PORT": "0",
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-m", "pipeline", "receiver", "--tunnel", relay]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        lines = iter(process.stdout)
        printed = [next(lines) for _ in range(4)]
        assert "  - POST https://n1.relay.example/webhooks/retrain\n" in printed
        assert commands_with(f"{tmp_path}/starts") != []
        process.kill()
    wait_until(
        lambda: [pid for pid in commands_with(f"{tmp_path}/starts") if pid != process.pid] == []
    )
