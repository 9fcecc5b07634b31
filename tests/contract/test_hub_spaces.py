"""The secrets of a Space, which `pipeline receiver deploy` sets by the calls of `HfApi`."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing

import pytest
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

from pipeline.hub.cipher import Cipher
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


def test_secrets_are_listed_without_their_values(hub: RunningHub, space: HfApi) -> None:
    space.add_space_secret(SPACE, "WEBHOOK_SECRET", "s3cret-of-the-space", description="Proof")
    space.add_space_secret(SPACE, "OTHER", "first")
    space.add_space_secret(SPACE, "OTHER", "value-two")
    listed = space.get_space_secrets(SPACE)
    assert {key: each.description for key, each in listed.items()} == {
        "OTHER": None,
        "WEBHOOK_SECRET": "Proof",
    }
    assert all(each.updated_at is not None for each in listed.values())
    answer = hub.request("GET", f"/api/spaces/{SPACE}/secrets")
    assert "s3cret-of-the-space" not in answer.text and "value-two" not in answer.text
    cipher = Cipher(SECRET_KEY)
    with closing(sqlite3.connect(hub.root / "hub.sqlite")) as connection:
        rows = connection.execute("SELECT key, encrypted_value FROM space_secrets").fetchall()
        dump = "\n".join(connection.iterdump())
    assert {key: cipher.decrypt(sealed) for key, sealed in rows} == {
        "OTHER": "value-two",
        "WEBHOOK_SECRET": "s3cret-of-the-space",
    }
    assert "s3cret-of-the-space" not in dump and "value-two" not in dump


def test_they_follow_the_space_and_end_with_it(hub: RunningHub, space: HfApi) -> None:
    space.add_space_secret(SPACE, "KEY", "x")
    space.move_repo(SPACE, "ada/moved", repo_type="space")
    assert list(space.get_space_secrets("ada/moved")) == ["KEY"]
    space.delete_repo("ada/moved", repo_type="space")
    with pytest.raises(RepositoryNotFoundError):
        space.get_space_secrets("ada/moved")
    space.create_repo(SPACE, repo_type="space", space_sdk="gradio")
    assert space.get_space_secrets(SPACE) == {}


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
    assert space.get_space_secrets(SPACE) == {}


def test_a_reader_may_not_see_which_secrets_there_are(hub: RunningHub, space: HfApi) -> None:
    made = hub.request("POST", "/api/settings/tokens/reader", params={"role": "read"})
    reader = HfApi(endpoint=hub.url, token=made.json()["token"])
    for act in (
        lambda: reader.get_space_secrets(SPACE),
        lambda: reader.add_space_secret(SPACE, "A", "x"),
    ):
        with pytest.raises(HfHubHTTPError, match="'reader' may only read") as refused:
            act()
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
    assert hub.request("GET", "/api/datasets/ada/facts/secrets").status_code == 400
