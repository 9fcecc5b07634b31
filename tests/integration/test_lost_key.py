"""`tokens.json` was written anew: what repairs itself, and what is named."""

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from cryptography.fernet import Fernet

from jobs.sealed import seal
from jobs.spec import JobSpec
from pipeline.doctor import examine
from pipeline.findings import Finding
from pipeline.hub.database import open_database
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
    return [each for each in examine(home, settings) if each.check == "secrets"]


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
            [(fault, step)] = faults(home, settings).items()
            assert f"webhook {webhook.id} to" in fault and "tokens.json was replaced" in fault
            assert "pipeline down && pipeline up" in step and "restore the old key" in step

            subscribe(settings, home, tokens)
            [received] = receiver.wait_for(1)
            assert received.path == ROUTE
            assert received.headers["x-webhook-secret"] == tokens.webhook
            assert faults(home, settings) == {}


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
        found = faults(home, settings)
        assert len(found) == 3
        for words, step in (
            (f"webhook {mine.id} to {url}", f"pipeline webhooks update {mine.id} --secret"),
            (
                f"webhook {copies.id} to job {source.id}",
                f"pipeline webhooks update {copies.id} --job-id {source.id} --secrets NAME=VALUE",
            ),
            (f"{waiting.id} cannot start", f"pipeline jobs cancel {waiting.id}"),
        ):
            [named] = [message for message in found if words in message]
            assert step in found[named]

        key = tokens.key.encode()
        with running_hub(home.hub_dir, secret_key=key, jobs_store=store) as hub:
            hub.api.update_webhook(mine.id, secret="n3w", watched=[])
            hub.api.update_webhook(copies.id, job_id=source.id, secrets={"A": "1"}, watched=[])
        store.cancel(waiting.id)
        assert faults(home, settings) == {}


@pytest.mark.parametrize("owners", ["webhooks", "jobs"])
def test_a_database_that_cannot_be_read_is_not_said_to_be_well(home: Home, owners: str) -> None:
    new_tokens(home)
    file = {"webhooks": home.hub_dir / "hub.sqlite", "jobs": home.jobs_database}[owners]
    file.parent.mkdir()
    file.write_bytes(b"no database " * 500)
    [found] = told_of_secrets(home, load_settings())
    assert found.level == "wrong"
    assert f"the secrets of {owners} are not checked, because" in found.message
    assert found.next_step == "upgrade hotpush, or restore a backup"


def test_secrets_in_an_older_database_are_checked_only_after_its_upgrade(home: Home) -> None:
    new_tokens(home)
    home.hub_dir.mkdir()
    database = home.hub_dir / "hub.sqlite"
    open_database(database).close()
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '0001'")
        connection.commit()
    [found] = told_of_secrets(home, load_settings())
    assert (found.level, "because the hub's database has an older schema" in found.message) == (
        "ok",
        True,
    )


def test_a_key_that_is_none_is_told(home: Home) -> None:
    tokens = new_tokens(home).model_copy(update={"key": "short"})
    home.tokens_file.write_text(tokens.model_dump_json())
    [found] = told_of_secrets(home, load_settings())
    assert found.message.endswith("tokens.json is not a Fernet key, so it decrypts no secret")
