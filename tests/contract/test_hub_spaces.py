"""The secrets of a Space, which `pipeline receiver deploy` sets by the calls of `HfApi`."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing

import pytest
from huggingface_hub import HfApi

from tests.hub_fixtures import RunningHub, recording_receiver, running_hub

SPACE = "ada/receiver"


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningHub]:
    with running_hub(tmp_path_factory.mktemp("hub")) as hub:
        yield hub


@pytest.fixture
def space(hub: RunningHub) -> Iterator[HfApi]:
    hub.api.create_repo(SPACE, repo_type="space", space_sdk="gradio")
    yield hub.api
    hub.api.delete_repo(SPACE, repo_type="space")


def test_a_secret_is_taken_and_not_stored(hub: RunningHub, space: HfApi) -> None:
    """No program of this hub could use it."""
    space.add_space_secret(SPACE, "WEBHOOK_SECRET", "s3cret-of-the-space", description="Proof")
    with closing(sqlite3.connect(hub.root / "hub.sqlite")) as connection:
        dump = "\n".join(connection.iterdump())
    assert "repo.config" in dump and "s3cret-of-the-space" not in dump


def test_a_change_is_an_event_about_the_configuration(hub: RunningHub, space: HfApi) -> None:
    with recording_receiver() as receiver:
        webhook = space.create_webhook(url=receiver.url, watched=[{"type": "space", "name": SPACE}])
        space.add_space_secret(SPACE, "A", "s3cret")
        (told,) = receiver.wait_for(1)
        space.delete_webhook(webhook.id)
    assert told.json["event"] == {"action": "update", "scope": "repo.config"}
    assert "s3cret" not in told.body.decode()


def test_only_spaces_have_them(hub: RunningHub) -> None:
    hub.api.create_repo("ada/facts", repo_type="dataset")
    body = {"key": "A", "value": "x"}
    assert hub.request("POST", "/api/datasets/ada/facts/secrets", json=body).status_code == 400
