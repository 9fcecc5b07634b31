"""`tokens.json` was written anew: what repairs itself, and what is named."""

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from cryptography.fernet import Fernet

from jobs.sealed import seal
from jobs.spec import JobSpec
from pipeline.doctor import check_secrets
from pipeline.facts import Facts, Finding
from pipeline.job_store import open_job_store
from pipeline.paths import Home
from pipeline.settings import Settings, load_settings
from pipeline.subscriptions import ROUTE, subscribe
from pipeline.tokens import Tokens
from tests.hub_fixtures import TOKEN, RunningHub, commit_file, recording_receiver, running_hub
from tests.hub_fixtures import wait_until as until

WATCHED = [{"type": "dataset", "name": "local/facts"}]


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


def told_of_secrets(home: Home, settings: Settings) -> list[Finding]:
    return list(check_secrets(Facts(home, settings)))


def faults(home: Home, settings: Settings) -> dict[str, str]:
    found = told_of_secrets(home, settings)
    return {each.message: each.next_step or "" for each in found if each.level == "wrong"}


def test_the_stacks_own_webhook_gets_the_new_secret_and_sends_what_waited(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule: dict[str, Any] = {"delivery_schedule_seconds": (0, 600)}
    with recording_receiver() as receiver:
        tokens = new_tokens(home)
        with running_hub(home.hub_dir, secret_key=tokens.key.encode(), **schedule) as hub:
            subscribe(told(hub, receiver.url, monkeypatch), home, tokens)
            [webhook] = hub.api.list_webhooks()
        tokens = new_tokens(home)
        with running_hub(home.hub_dir, secret_key=tokens.key.encode(), **schedule) as hub:
            settings = told(hub, receiver.url, monkeypatch)
            hub.git("clone", "-q", f"{hub.url}/datasets/local/facts", "facts", cwd=tmp_path)
            commit_file(hub, tmp_path / "facts", "rows.jsonl", "{}\n")
            hub.git("push", "-q", "origin", "HEAD:main", cwd=tmp_path / "facts")
            [failed] = until(lambda: [one for one in hub.deliveries(webhook.id) if one["attempt"]])
            assert "with another key" in failed["error"] and not receiver.received
            assert faults(home, settings) == {}, "the next start of the stack sets it again"
            subscribe(settings, home, tokens)
            [received] = receiver.wait_for(1)
            assert received.path == ROUTE
            assert received.headers["x-webhook-secret"] == tokens.webhook


def test_secrets_that_only_a_person_knows_are_named(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = new_tokens(home)
    key = tokens.key.encode()
    with closing(open_job_store(load_settings(), home)) as store:
        source = store.submit(JobSpec(command=("true",))).job
        sealed = seal({"TOKEN": "t"}, key)
        waiting = store.submit(JobSpec(command=("true",), sealed_env=sealed)).job
        with running_hub(home.hub_dir, secret_key=key, jobs_store=store) as hub:
            settings = told(hub, "http://127.0.0.1:9/", monkeypatch)
            hub.create_dataset("local/facts")
            url = "http://127.0.0.1:9/webhooks/mine"
            mine = hub.api.create_webhook(url=url, watched=WATCHED, secret="s3cret")
            copies = hub.api.create_webhook(
                job_id=source.id, watched=WATCHED, secrets={"A": "1", "B": "2"}
            )
        assert faults(home, settings) == {}
        tokens = new_tokens(home)
        [(message, step)] = faults(home, settings).items()
        named = {f"webhook {mine.id}", f"webhook {copies.id}", f"job {waiting.id}"}
        owners = message.removeprefix("the secrets of ").partition(" were encrypted")[0]
        assert set(owners.split(", ")) == named and "tokens.json was replaced" in message
        assert "restore the old key" in step and "pipeline webhooks update ID" in step

        key = tokens.key.encode()
        with running_hub(home.hub_dir, secret_key=key, jobs_store=store) as hub:
            hub.api.update_webhook(mine.id, secret="n3w", watched=[])
            hub.api.update_webhook(copies.id, job_id=source.id, secrets={"A": "1"}, watched=[])
        store.cancel(waiting.id)
        assert faults(home, settings) == {}


def test_a_key_that_is_none_is_told(home: Home) -> None:
    tokens = new_tokens(home).model_copy(update={"key": "short"})
    home.tokens_file.write_text(tokens.model_dump_json())
    [found] = told_of_secrets(home, load_settings())
    assert found.message == "the key in tokens.json is not a Fernet key"
