"""Scripts for the `WebhooksServer` of `huggingface_hub`, each run with both import lines. A script
prints what it found, and both runs must print the same."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.ports import free_port
from tests.receiver_payloads import dataset_update
from tests.receiver_scripts import ROOT

IMPORTS = {
    "theirs": "from huggingface_hub import WebhookPayload, WebhooksServer, webhook_endpoint",
    "ours": "from receiver import WebhookPayload, WebhooksServer, webhook_endpoint",
}

# What the tests of huggingface_hub use: a page of gradio, handlers of all kinds, and a client
# inside the process.
LIKE_ITS_OWN_TESTS = """
import io, contextlib, json, os, sys
import gradio, httpx
from fastapi import Request
from fastapi.testclient import TestClient

PAYLOAD = json.loads(os.environ["PAYLOAD"])
found = {}

with gradio.Blocks() as ui:
    gradio.Markdown("# mine")
app = WebhooksServer(ui=ui, webhook_secret="s3cret")

@app.add_webhook
async def with_payload(payload: WebhookPayload) -> None:
    return {"scope": payload.event.scope}

@app.add_webhook
async def async_with_request(request: Request) -> None:
    return {"secret": request.headers["x-webhook-secret"]}

@app.add_webhook
def sync_alone() -> None:
    return {"alone": True}

@app.add_webhook(path="/a/name/")
async def with_a_name() -> None:
    return {"named": True}

found["registered"] = sorted(app.registered_webhooks)
found["secret"] = app.webhook_secret
try:
    app.add_webhook("with_payload")(lambda: None)
except ValueError as error:
    found["twice"] = str(error)

printed = io.StringIO()
with contextlib.redirect_stdout(printed):
    app.launch(prevent_thread_lock=True, share=False)
lines = printed.getvalue().splitlines()
url = "http://127.0.0.1:" + os.environ["GRADIO_SERVER_PORT"]
found["ready"] = "Webhooks are correctly setup and ready to use:" in lines
found["printed"] = [line.replace(url, "URL") for line in lines if line.startswith("  - POST ")]

@app.fastapi_app.get("/of/the/script")
def of_the_script():
    return "served"

def answers(client, url):
    right, wrong = {"x-webhook-secret": "s3cret"}, {"x-webhook-secret": "other"}
    for name in sorted(app.registered_webhooks):
        told = [
            client.post(url + name, headers=headers, json=PAYLOAD) for headers in (right, wrong, {})
        ]
        yield name, [(one.status_code, one.json()) for one in told]
    yield "route", client.get(url + "/of/the/script").json()

found["inside"] = list(answers(TestClient(app.fastapi_app), ""))
with httpx.Client() as client:
    found["by http"] = list(answers(client, url))
    found["page"] = client.get(url + "/config").json()["components"][0]["props"]["value"]

print(json.dumps(found))
"""


def found_by(script: str, folder: Path, whose: str) -> Any:
    """What the script printed last, read from JSON."""
    file = folder / f"{whose}.py"
    file.write_text(f"{IMPORTS[whose]}\n{script}")
    done = subprocess.run(
        [sys.executable, str(file)],
        cwd=folder,
        env=os.environ
        | {
            "PYTHONPATH": str(ROOT),
            "PYTHONWARNINGS": "ignore",
            "GRADIO_ANALYTICS_ENABLED": "False",
            "GRADIO_SERVER_PORT": str(free_port()),
            "PAYLOAD": json.dumps(dataset_update()),
        },
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow  # imports gradio twice
def test_a_script_finds_the_same_with_either_import(tmp_path: Path) -> None:
    ours = found_by(LIKE_ITS_OWN_TESTS, tmp_path, "ours")
    assert ours == found_by(LIKE_ITS_OWN_TESTS, tmp_path, "theirs")
