"""The hub's page of deliveries in a real browser, with and without the token.

Screenshots go to the folder that `SCREENSHOTS_DIR` names, else to the test's own.
"""

import os
import struct
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from tests.hub_fixtures import Receiver, RunningHub, commit_file, running_hub, wait_until
from tests.integration.test_receiver_landing import chromium

pytest_plugins = ["tests.hub_plugin"]


Headers = list[tuple[bytes, bytes]]


@pytest.fixture
def added() -> Headers:
    """The headers that each request gets on its way to the hub. Chromium takes no cookie from its
    command line."""
    return []


@pytest.fixture
def hub(tmp_path: Path, added: Headers) -> Iterator[RunningHub]:
    def around(app: ASGIApp) -> ASGIApp:
        async def with_headers(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http":
                scope = {**scope, "headers": [*scope["headers"], *added]}
            await app(scope, receive, send)

        return with_headers

    with running_hub(tmp_path / "hub", around=around, delivery_schedule_seconds=(0, 0.05)) as hub:
        yield hub


@pytest.fixture
def page(hub: RunningHub, receiver: Receiver, worktree: Path) -> str:
    """Of a webhook with a delivery that failed once."""
    watched = [{"type": "dataset", "name": "local/facts"}]
    receiver.answers.append((500, {}))
    receiver.body = b"<b>no</b>"
    created = hub.api.create_webhook(url=receiver.url, watched=watched)
    commit_file(hub, worktree, "a.txt", "1")
    hub.git("push", "-q", "origin", "main", cwd=worktree)
    wait_until(lambda: [one["status"] for one in hub.deliveries(created.id)] == ["delivered"])
    return f"{hub.url}/settings/webhooks/{created.id}"


@pytest.fixture
def own_page(hub: RunningHub, page: str, added: Headers) -> str:
    """The page in a browser that has logged in."""
    answer = httpx.post(f"{hub.url}/settings/login", data={"token": hub.token}, verify=False)
    added.append((b"cookie", answer.headers["set-cookie"].partition(";")[0].encode()))
    return page


def test_it_shows_each_delivery_and_a_button_to_send_it_again(
    own_page: str, tmp_path: Path
) -> None:
    shown = chromium(tmp_path, "--dump-dom", own_page)
    assert "delivered" in shown and "local/facts" in shown
    assert "&lt;b&gt;no&lt;/b&gt;" in shown, "what a receiver answers is text"
    assert "<button" in shown and "/replay" in shown


def test_it_is_drawn(own_page: str, tmp_path: Path) -> None:
    folder = Path(os.environ.get("SCREENSHOTS_DIR", tmp_path))
    picture = folder / "hub-deliveries.png"
    chromium(tmp_path, f"--screenshot={picture}", "--window-size=1280,900", own_page)
    assert struct.unpack(">II", picture.read_bytes()[16:24]) == (1280, 900)
    assert picture.stat().st_size > 10_000, "an empty page is far smaller"


def test_without_the_token_there_is_nothing_to_see(page: str, tmp_path: Path) -> None:
    shown = chromium(tmp_path, "--dump-dom", page)
    assert "local/facts" not in shown and "<form" in shown
