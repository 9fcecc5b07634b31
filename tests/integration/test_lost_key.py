"""`tokens.json` was written anew: what repairs itself, and what is named."""

import json
from pathlib import Path
from typing import Any

import pytest
from cryptography.fernet import Fernet

from pipeline.paths import Home
from pipeline.settings import Settings, load_settings
from pipeline.stack.subscriptions import ROUTE, subscribe
from pipeline.tokens import Tokens
from tests.hub_fixtures import TOKEN, RunningHub, push_file, recording_receiver, running_hub
from tests.hub_fixtures import wait_until as until


def new_tokens(home: Home) -> Tokens:
    key = Fernet.generate_key().decode()
    tokens = Tokens(hub=TOKEN, admin="a", webhook=f"secret-{key[:8]}", key=key)
    home.tokens_file.write_text(json.dumps(tokens.model_dump()))
    home.tokens_file.chmod(0o600)
    return tokens


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    home = Home(tmp_path / ".pipeline")
    home.root.mkdir()
    settings = tmp_path / "pipeline.toml"
    settings.write_text('[[pipelines]]\nname = "facts"\ndataset = "local/facts"\n')
    monkeypatch.setenv("PIPELINE_SETTINGS", str(settings))
    monkeypatch.setenv("PIPELINE_HOME", str(home.root))
    return home


def told(hub: RunningHub, receiver_url: str, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setenv("PIPELINE_HUB__PORT", str(hub.settings.port))
    monkeypatch.setenv("PIPELINE_RECEIVER__PORT", receiver_url.rpartition(":")[2].split("/")[0])
    return load_settings()


def test_the_stacks_own_webhook_gets_the_new_secret_and_sends_what_waited(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule: dict[str, Any] = {"delivery_schedule_seconds": (0, 600)}
    with recording_receiver() as receiver:
        tokens = new_tokens(home)
        with running_hub(home.hub_dir, secret_key=tokens.key.encode(), **schedule) as hub:
            hub.create_dataset("local/facts")
            subscribe(told(hub, receiver.url, monkeypatch), home, tokens)
            [webhook] = hub.api.list_webhooks()
        tokens = new_tokens(home)
        with running_hub(home.hub_dir, secret_key=tokens.key.encode(), **schedule) as hub:
            settings = told(hub, receiver.url, monkeypatch)
            hub.git("clone", "-q", f"{hub.url}/datasets/local/facts", "facts", cwd=tmp_path)
            push_file(hub, tmp_path / "facts", "rows.jsonl", "{}\n")
            [failed] = until(lambda: [one for one in hub.deliveries(webhook.id) if one["attempt"]])
            assert "with another key" in failed["error"] and not receiver.received
            subscribe(settings, home, tokens)
            [received] = receiver.wait_for(1)
            assert received.path == ROUTE
            assert received.headers["x-webhook-secret"] == tokens.webhook
