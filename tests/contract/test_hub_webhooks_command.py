"""Webhooks from a terminal: our own command, and the Hub client's unmodified one."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from jobs.spec import JobSpec
from jobs.store import JobStore
from pipeline.cli.main import app
from receiver.errors import WebhookApiError
from tests.hub_fixtures import SECRET_KEY, Receiver, RunningHub, running_hub, wait_until

pytest_plugins = ["tests.hub_plugin"]

NOWHERE = "http://127.0.0.1:9/"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JobStore]:
    with JobStore.open(tmp_path_factory.mktemp("jobs") / "jobs.sqlite") as store:
        yield store


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory, store: JobStore) -> Iterator[RunningHub]:
    folder = tmp_path_factory.mktemp("state")
    with running_hub(folder / "hub", jobs_store=store, delivery_schedule_seconds=(0, 0.01)) as hub:
        yield hub


@pytest.fixture(autouse=True)
def no_webhooks(hub: RunningHub) -> None:
    for webhook in hub.api.list_webhooks():
        hub.api.delete_webhook(webhook.id)


class Command:
    """`pipeline webhooks`, in this process."""

    def __init__(self, hub: RunningHub) -> None:
        self._endpoint = ("--endpoint", hub.url)

    def __call__(self, *arguments: str, code: int = 0, typed: str = "") -> str:
        """What it printed."""
        result = self.run(*arguments, typed=typed)
        assert result.exit_code == code, f"{result.output}\n{result.exception!r}"
        return result.stdout.strip()

    def run(self, *arguments: str, typed: str = "") -> Result:
        return CliRunner().invoke(app, ["webhooks", *arguments, *self._endpoint], input=typed)

    def json(self, *arguments: str, code: int = 0) -> Any:
        return json.loads(self(*arguments, "--json", code=code))

    def refused(self, *arguments: str) -> str:
        """Why."""
        error = self.run(*arguments).exception
        assert error is not None and not isinstance(error, SystemExit), error
        return str(error)


@pytest.fixture
def webhooks(hub: RunningHub, monkeypatch: pytest.MonkeyPatch) -> Command:
    monkeypatch.setenv("HF_TOKEN", hub.token)
    return Command(hub)


def test_a_webhook_from_its_creation_to_its_end(webhooks: Command) -> None:
    watch = ("--watch", "dataset:local/facts", "--watch", "org:team")
    created = webhooks.json("create", *watch, "--url", NOWHERE, "--domain", "repo")
    id = created["id"]
    assert (created["url"], created["status"], created["domains"]) == (NOWHERE, "enabled", ["repo"])
    assert [item["type"] for item in created["watched"]] == ["dataset", "org"]
    assert webhooks("ls", "--quiet") == id
    assert [one["id"] for one in webhooks.json("ls")] == [id]
    assert all(word in webhooks("ls") for word in (id, "enabled", "org:team"))

    changed = webhooks.json("update", id, "--url", f"{NOWHERE}new")
    assert changed == created | {"url": f"{NOWHERE}new"}
    assert json.loads(webhooks("info", id)) == changed
    assert webhooks("info", id, "--quiet") == id
    assert webhooks("disable", id) == f"Webhook {id} is disabled"
    assert webhooks.json("ls")[0]["status"] == "disabled"
    assert webhooks("enable", id, "--quiet") == id
    assert webhooks.json("ls")[0]["status"] == "enabled"
    assert webhooks.json("delete", id, "--yes") == {"id": id}
    assert webhooks.json("ls") == []
    assert webhooks("ls") == "No webhook yet."


@pytest.mark.parametrize(
    ("watched", "domain", "told"),
    [
        ("dataset:owner/fatcs", "repo", "there is no dataset:owner/fatcs here"),
        ("model:owner/facts", "repo", "there is no model:owner/facts here"),
        ("user:ownre", "repo", "user:ownre has no repository here"),
        ("bucket:owner/facts", "repo", "this hub has no buckets"),
    ],
)
def test_a_watch_that_never_fires_is_told(
    hub: RunningHub,
    webhooks: Command,
    watched: str,
    domain: str,
    told: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    hub.api.create_repo("owner/facts", repo_type="dataset", exist_ok=True)
    well = ("--watch", "dataset:owner/facts", "--domain", "repo")
    id = webhooks("create", *well, "--url", NOWHERE, "--quiet")
    assert caplog.messages == []
    assert webhooks("update", id, "--watch", watched, "--domain", domain, "--quiet") == id
    [printed] = caplog.messages  # by the Hub's client
    assert told in printed
    told_by_ls = webhooks.run("ls").stderr
    assert told_by_ls.startswith(f"{id}: ") and told in told_by_ls
    (warning,) = webhooks.json("info", id)["warnings"]
    assert told in warning
    webhooks("update", id, *well)
    assert webhooks.run("ls").stderr == ""
    assert caplog.messages == [printed]


def test_a_deletion_is_confirmed(webhooks: Command) -> None:
    id = webhooks("create", "--watch", "user:local", "--url", NOWHERE, "--quiet")
    assert "Are you sure" in webhooks("delete", id, code=1, typed="n\n")
    assert "Are you sure" in webhooks("delete", id, code=1)  # nobody there to answer
    assert "--yes" in webhooks.refused("delete", id, "--quiet")
    assert webhooks("ls", "--quiet") == id
    webhooks("delete", id, typed="y\n")
    assert webhooks("ls", "--quiet") == ""


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--url", NOWHERE), "needs something to watch: set --watch to at least one item"),
        (("--watch", "user:x"), "--url or --job-id"),
        (("--watch", "user:x", "--job-id", "j999999"), "no job 'j999999'"),
        (("--watch", "user:x", "--url", "ftp://x/"), "URL scheme should be 'http' or 'https'"),
    ],
)
def test_what_cannot_be_created_is_explained(
    webhooks: Command, arguments: tuple[str, ...], reason: str
) -> None:
    assert reason in webhooks.refused("create", *arguments)
    assert webhooks.json("ls") == []


def test_a_webhook_may_start_a_job(webhooks: Command, store: JobStore) -> None:
    job = store.submit(JobSpec(command=("true",))).id
    created = webhooks.json("create", "--watch", "user:local", "--job-id", job)
    assert created["url"] is None
    assert created["job"]["sourceId"] == job
    assert "(job)" in webhooks("ls")


def test_an_unknown_webhook_is_named(webhooks: Command) -> None:
    for command in ("info", "enable", "disable", "update"):
        assert "no webhook 'nope'" in webhooks.refused(command, "nope")
    assert "'nope'" in webhooks.refused("delete", "nope", "--yes")
    assert "'nope'" in webhooks.refused("test", "nope")
    assert "'nope'" in webhooks.refused("deliveries", "nope")
    assert "'nope'" in webhooks.refused("replay", "nope")


def test_a_wrong_token_and_a_hub_that_is_not_there_are_explained(
    webhooks: Command, hub: RunningHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "wrong")
    assert "401" in webhooks.refused("ls")
    assert "401" in webhooks.refused("deliveries")
    result = CliRunner().invoke(app, ["webhooks", "deliveries", "--endpoint", NOWHERE])
    assert isinstance(result.exception, WebhookApiError)
    assert "cannot be reached" in str(result.exception)


def test_another_hub_never_gets_the_token_of_a_stack(
    webhooks: Command, hub: RunningHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PIPELINE_ENV_TOKEN", hub.token)  # as `pipeline env` sets it
    assert "401" in webhooks.refused("ls")
    monkeypatch.delenv("PIPELINE_ENV_TOKEN")
    assert webhooks("ls") == "No webhook yet."
    tokens = {"hub": hub.token, "admin": "a", "webhook": "w", "key": SECRET_KEY.decode()}
    (tmp_path / "tokens.json").write_text(json.dumps(tokens))
    monkeypatch.setenv("PIPELINE_HOME", str(tmp_path))
    assert "401" in webhooks.refused("deliveries")


def test_deliveries_are_listed_replayed_and_tested(
    webhooks: Command, hub: RunningHub, receiver: Receiver
) -> None:
    id = webhooks("create", "--watch", "user:tested", "--url", receiver.url, "--quiet")
    assert webhooks("deliveries", id) == "No delivery."
    assert '200 {"ok": true}' in webhooks("test", id)
    [ping] = webhooks.json("deliveries", id)
    assert (ping["scope"], ping["status"], ping["attempt"]) == ("ping", "delivered", 1)
    assert webhooks("deliveries", id, "--quiet", "--status", "delivered") == ping["id"]
    assert webhooks.json("deliveries", id, "--status", "dead") == []
    assert webhooks("deliveries", id, "--status", "dead") == "No dead delivery."
    assert all(word in webhooks("deliveries", id) for word in (ping["id"], "delivered", "200"))
    assert ping["id"] in [one["id"] for one in webhooks.json("deliveries", "--limit", "1")]

    assert webhooks("replay", ping["id"]) == f"Delivery {ping['id']} is sent again"
    receiver.wait_for(2)
    forced = webhooks("replay", ping["id"], "--force", "--quiet")
    assert receiver.wait_for(3)[2].headers["webhook-id"] == forced != ping["id"]

    receiver.answers = [(500, {})] * 2
    failed = webhooks.json("test", id, code=1)
    assert failed["response_status"] == 500
    wait_until(lambda: webhooks.json("deliveries", id, "--status", "dead"))

    webhooks("disable", id)
    assert "enable it first" in webhooks.refused("replay", ping["id"])


def test_the_hub_clients_own_command_works_unmodified(hub: RunningHub, tmp_path: Path) -> None:
    env = {
        "HF_ENDPOINT": hub.url,
        "HF_TOKEN": hub.token,
        "HF_HOME": str(tmp_path),
        "HF_HUB_DISABLE_UPDATE_CHECK": "1",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }

    def hf(*arguments: str) -> str:
        done = subprocess.run(
            ["hf", "webhooks", *arguments], env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        return done.stdout.strip()

    id = hf("create", "--watch", "user:local", "--url", NOWHERE, "--secret", "x", "--quiet")
    hf("update", id, "--url", f"{NOWHERE}new")
    shown = json.loads(hf("info", id, "--json"))
    assert shown["url"] == f"{NOWHERE}new"
    assert shown["watched"] == [{"type": "user", "name": "local"}]  # the client sent []
    assert "secret" not in shown
    hf("disable", id)
    assert [(one["id"], one["disabled"]) for one in json.loads(hf("ls", "--json"))] == [(id, True)]
    hf("delete", id, "--yes")
    assert hub.api.list_webhooks() == []
