"""The secrets of a Space, which `pipeline receiver deploy` sets by the calls of `HfApi`."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing

import pytest
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError

from jobs.sealed import unseal
from tests.hub_fixtures import SECRET_KEY, RunningHub, recording_receiver, running_hub

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


def stored(hub: RunningHub) -> dict[str, str]:
    """The decrypted secrets of all Spaces."""
    with closing(sqlite3.connect(hub.root / "hub.sqlite")) as connection:
        rows = connection.execute("SELECT key, encrypted_value FROM space_secrets").fetchall()
    return {key: unseal(sealed, SECRET_KEY)[key] for key, sealed in rows}


def test_secrets_are_stored_encrypted(hub: RunningHub, space: HfApi) -> None:
    space.add_space_secret(SPACE, "WEBHOOK_SECRET", "s3cret-of-the-space", description="Proof")
    space.add_space_secret(SPACE, "OTHER", "first")
    space.add_space_secret(SPACE, "OTHER", "value-two")
    assert stored(hub) == {"OTHER": "value-two", "WEBHOOK_SECRET": "s3cret-of-the-space"}
    with closing(sqlite3.connect(hub.root / "hub.sqlite")) as connection:
        dump = "\n".join(connection.iterdump())
    assert "s3cret-of-the-space" not in dump and "value-two" not in dump


def test_they_follow_the_space_and_end_with_it(hub: RunningHub, space: HfApi) -> None:
    space.add_space_secret(SPACE, "KEY", "x")
    space.move_repo(SPACE, "ada/moved", repo_type="space")
    assert stored(hub) == {"KEY": "x"}
    space.delete_repo("ada/moved", repo_type="space")
    assert stored(hub) == {}
    space.create_repo(SPACE, repo_type="space", space_sdk="gradio")


@pytest.mark.parametrize(
    ("key", "value", "fault"),
    [("A B", "x", "key"), ("A\n", "x", "key"), ("A", "a\0b", "value"), ("A", "", "value")],
)
def test_what_cannot_be_a_variable_of_a_process_is_refused(
    hub: RunningHub, space: HfApi, key: str, value: str, fault: str
) -> None:
    with pytest.raises(HfHubHTTPError, match=f"JSON is wrong: {fault}") as refused:
        space.add_space_secret(SPACE, key, value)
    assert refused.value.response.status_code == 400
    assert stored(hub) == {}


def test_a_reader_may_not_set_one(hub: RunningHub, space: HfApi) -> None:
    made = hub.request("POST", "/api/settings/tokens/reader", params={"role": "read"})
    reader = HfApi(endpoint=hub.url, token=made.json()["token"])
    with pytest.raises(HfHubHTTPError, match="'reader' may only read") as refused:
        reader.add_space_secret(SPACE, "A", "x")
    assert refused.value.response.status_code == 403


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
