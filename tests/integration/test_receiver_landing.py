"""The landing page in a real browser: on a desk, on a phone, and without a style sheet.

Screenshots go to the folder that `SCREENSHOTS_DIR` names, else to the test's own.
"""

import html
import os
import re
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from fastapi.responses import HTMLResponse
from fastapi.testclient import TestClient

from receiver.server import WebhookPayload, WebhooksServer
from receiver.settings import ReceiverSettings
from tests.receiver_fixtures import no_secret_in_the_environment  # noqa: F401

DESK, PHONE = (1280, 1400), (500, 1400)  # a headless window is never narrower than 500
WIDTHS = (1280, 768, 360)


@pytest.fixture
def url() -> Iterator[str]:
    server = WebhooksServer(webhook_secret="s3cret", settings=ReceiverSettings(port=0))

    @server.add_webhook("/retrain")
    def retrain(payload: WebhookPayload) -> None: ...

    @server.add_webhook("/rebuild-the-index-of-everything-that-was-ever-written")
    def index(payload: WebhookPayload) -> None: ...

    server.add_webhook("/pushes", proof="github", webhook_secret="x")(retrain)

    frames = "".join(f'<iframe src="/" width="{width}"></iframe>' for width in WIDTHS)
    measure = (
        "for (const frame of document.querySelectorAll('iframe'))"
        " document.body.append(`[${wider(frame.contentDocument.documentElement)}]`)"
    )
    wider = "const wider = page => page.scrollWidth - page.clientWidth;"
    page = f'{frames}<script>{wider} addEventListener("load", () => {{ {measure} }})</script>'
    server.app.get("/measure")(lambda: HTMLResponse(f"<body>{page}"))

    running = server.launch(prevent_thread_lock=True)
    yield running
    server.close()


def chromium(folder: Path, *arguments: str) -> str:
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("there is no Chromium on this machine")
    flags = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking")
    quiet = ("--no-first-run", "--disable-dev-shm-usage", f"--user-data-dir={folder}/profile")
    done = subprocess.run(
        [program, *flags, *quiet, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "HOME": str(folder)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("size", [DESK, PHONE], ids=["desk", "phone"])
def test_it_is_drawn(url: str, tmp_path: Path, size: tuple[int, int]) -> None:
    folder = Path(os.environ.get("SCREENSHOTS_DIR", tmp_path))
    folder.mkdir(parents=True, exist_ok=True)
    picture = folder / f"landing-{size[0]}.png"
    width, height = size
    chromium(tmp_path, f"--screenshot={picture}", f"--window-size={width},{height}", url)
    assert struct.unpack(">II", picture.read_bytes()[16:24]) == size
    assert picture.stat().st_size > 20_000, "an empty page is far smaller"


def test_nothing_sticks_out_at_any_width(url: str, tmp_path: Path) -> None:
    drawn = chromium(tmp_path, "--dump-dom", "--virtual-time-budget=5000", f"{url}/measure")
    assert re.findall(r"\[(-?\d+)\]", drawn) == ["0" for _ in WIDTHS]


def test_it_reads_well_without_a_style_sheet(url: str) -> None:
    page = httpx.get(url).text
    bare = re.sub(r"<style>.*?</style>", "", page, flags=re.DOTALL)
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", bare))
    for expected in (
        f"Webhooks post to this URL: {url}/webhooks/retrain",
        "Secret: set",
        f"pipeline webhooks create \\ --url {url}/webhooks/retrain \\ --watch dataset:OWNER/NAME",
        "choose the content type application/json",
    ):
        assert expected in text, text
    assert "<script" not in page and "http://" not in page.replace(url, ""), "nothing is loaded"


def test_each_command_names_the_secret_that_the_handler_asks_for() -> None:
    def commands(server: WebhooksServer) -> list[str]:
        server.add_webhook("/shared")(lambda payload: None)
        server.add_webhook("/own", webhook_secret="another")(lambda payload: None)
        page = html.unescape(TestClient(server.app).get("/").text)
        return re.findall(r"--secret ([^<]+)</pre>", page)

    assert commands(WebhooksServer(webhook_secret="s3cret")) == [
        '"$WEBHOOK_SECRET"',
        "SECRET-OF-THIS-HANDLER",
    ]
    stack = WebhooksServer(webhook_secret="s3cret", secret_in_shell="$(cat tokens.json)")
    assert commands(stack) == ["$(cat tokens.json)", "SECRET-OF-THIS-HANDLER"]
