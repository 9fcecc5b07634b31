"""The hub's page of deliveries in a real browser, with and without the token.

Screenshots go to the folder that `SCREENSHOTS_DIR` names, else to the test's own.
"""

import os
import struct
from pathlib import Path

import pytest

from tests.hub_fixtures import Receiver, RunningHub, commit_file, wait_until
from tests.integration.test_receiver_landing import chromium

pytest_plugins = ["tests.hub_plugin"]


@pytest.fixture
def page(hub: RunningHub, receiver: Receiver, worktree: Path) -> str:
    """Of a webhook with a delivery that failed once; a browser signs in through its URL."""
    watched = [{"type": "dataset", "name": "local/facts"}]
    receiver.answers.append((500, {}))
    receiver.body = b"<b>no</b>"
    created = hub.api.create_webhook(url=receiver.url, watched=watched)
    commit_file(hub, worktree, "a.txt", "1")
    hub.git("push", "-q", "origin", "main", cwd=worktree)
    wait_until(lambda: [one["status"] for one in hub.deliveries(created.id)] == ["delivered"])
    return f"{hub.url}/settings/webhooks/{created.id}".replace("//", f"//me:{hub.token}@")


def test_it_shows_each_delivery_and_a_button_to_send_it_again(page: str, tmp_path: Path) -> None:
    shown = chromium(tmp_path, "--dump-dom", page)
    assert "delivered" in shown and "local/facts" in shown
    assert "&lt;b&gt;no&lt;/b&gt;" in shown, "what a receiver answers is text"
    assert "<button" in shown and "/replay" in shown


def test_it_is_drawn(page: str, tmp_path: Path) -> None:
    folder = Path(os.environ.get("SCREENSHOTS_DIR", tmp_path))
    picture = folder / "hub-deliveries.png"
    chromium(tmp_path, f"--screenshot={picture}", "--window-size=1280,900", page)
    assert struct.unpack(">II", picture.read_bytes()[16:24]) == (1280, 900)
    assert picture.stat().st_size > 10_000, "an empty page is far smaller"


def test_without_the_token_there_is_nothing_to_see(page: str, tmp_path: Path) -> None:
    scheme, _, rest = page.partition("//")
    shown = chromium(tmp_path, "--dump-dom", f"{scheme}//{rest.rpartition('@')[2]}")
    assert "local/facts" not in shown
