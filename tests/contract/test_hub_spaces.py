"""The secrets of a Space, which `pipeline receiver deploy` sets by the calls of `HfApi`."""

import sqlite3
from contextlib import closing

from tests.hub_fixtures import RunningHub

pytest_plugins = ["tests.hub_plugin"]

SPACE = "ada/receiver"


def test_a_secret_is_told_as_a_change_and_not_stored(hub: RunningHub) -> None:
    """No program of this hub could use it."""
    hub.api.create_repo(SPACE, repo_type="space", space_sdk="gradio")
    watched = [{"type": "space", "name": SPACE}]
    webhook = hub.api.create_webhook(url="http://127.0.0.1:9/", watched=watched)
    hub.api.add_space_secret(SPACE, "WEBHOOK_SECRET", "s3cret-of-the-space", description="Proof")
    [told] = hub.deliveries(webhook.id)
    assert (told["action"], told["scope"]) == ("update", "repo.config")
    with closing(sqlite3.connect(hub.root / "hub.sqlite")) as connection:
        dump = "\n".join(connection.iterdump())
    assert "repo.config" in dump and "s3cret-of-the-space" not in dump


def test_only_spaces_have_them(hub: RunningHub) -> None:
    hub.api.create_repo("ada/facts", repo_type="dataset")
    body = {"key": "A", "value": "x"}
    assert hub.request("POST", "/api/datasets/ada/facts/secrets", json=body).status_code == 400
