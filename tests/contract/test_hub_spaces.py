"""Secrets and variables of a Space, by the calls of `HfApi`."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

from pipeline.hub.webhooks.store import SecretCipher
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
    cipher = SecretCipher(SECRET_KEY)
    with closing(sqlite3.connect(hub.root / "hub.sqlite")) as connection:
        rows = connection.execute("SELECT key, value, encrypted_value FROM space_settings")
        return {
            key: value if sealed is None else cipher.decrypt(sealed) for key, value, sealed in rows
        }


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
    assert stored(hub) == {"OTHER": "value-two", "WEBHOOK_SECRET": "s3cret-of-the-space"}
    with closing(sqlite3.connect(hub.root / "hub.sqlite")) as connection:
        dump = "\n".join(connection.iterdump())
    assert "s3cret-of-the-space" not in dump and "value-two" not in dump

    space.delete_space_secret(SPACE, "OTHER")
    assert list(space.get_space_secrets(SPACE)) == ["WEBHOOK_SECRET"]
    with pytest.raises(HfHubHTTPError, match=f"{SPACE} has no secret OTHER"):
        space.delete_space_secret(SPACE, "OTHER")


def test_variables_are_listed_with_their_values(hub: RunningHub, space: HfApi) -> None:
    added = space.add_space_variable(SPACE, "MODEL", "me/base", description="The base")
    assert (added["MODEL"].value, added["MODEL"].description) == ("me/base", "The base")
    space.add_space_variable(SPACE, "MODEL", "me/other")
    assert space.get_space_variables(SPACE)["MODEL"].value == "me/other"
    with pytest.raises(HfHubHTTPError, match="has a variable MODEL already: delete it first"):
        space.add_space_secret(SPACE, "MODEL", "x")
    assert stored(hub) == {"MODEL": "me/other"}
    assert space.delete_space_variable(SPACE, "MODEL") == {}


def test_a_space_is_created_with_its_secrets_and_variables(hub: RunningHub) -> None:
    secrets = [{"key": "TOKEN", "value": "s3cret", "description": "Proof"}]
    variables = [{"key": "MODEL", "value": "me/base"}]
    new: dict[str, Any] = {"repo_id": SPACE, "repo_type": "space", "space_sdk": "gradio"}
    with pytest.raises(HfHubHTTPError, match="has a secret TOKEN already: delete it first"):
        hub.api.create_repo(**new, space_secrets=secrets, space_variables=secrets)
    with pytest.raises(HfHubHTTPError, match=r"JSON is wrong: variables\.0\.key"):
        hub.api.create_repo(**new, space_variables=[{"key": "A B", "value": "x"}])
    hub.api.create_repo(**new, space_secrets=secrets, space_variables=variables)
    assert stored(hub) == {"TOKEN": "s3cret", "MODEL": "me/base"}
    assert hub.api.get_space_secrets(SPACE)["TOKEN"].description == "Proof"
    assert hub.api.get_space_variables(SPACE)["MODEL"].value == "me/base"
    hub.api.delete_repo(SPACE, repo_type="space")
    body = {"name": "x", "organization": "ada", "type": "dataset", "secrets": secrets}
    answer = hub.request("POST", "/api/repos/create", json=body)
    assert (answer.status_code, "A dataset has no secrets" in answer.text) == (400, True)


def test_they_follow_the_space_and_end_with_it(hub: RunningHub, space: HfApi) -> None:
    space.add_space_variable(SPACE, "MODEL", "me/base")
    space.move_repo(SPACE, "ada/moved", repo_type="space")
    assert list(space.get_space_variables("ada/moved")) == ["MODEL"]
    space.delete_repo("ada/moved", repo_type="space")
    with pytest.raises(RepositoryNotFoundError):
        space.get_space_variables("ada/moved")
    space.create_repo(SPACE, repo_type="space", space_sdk="gradio")
    assert space.get_space_variables(SPACE) == {}


@pytest.mark.parametrize(
    ("key", "value", "fault"),
    [
        ("", "x", "key"),
        ("A B", "x", "key"),
        ("A\n", "x", "key"),
        ("1A", "x", "key"),
        ("A", "", "value"),
        ("A", "a\0b", "value"),
        ("A", "x" * 70_000, "value"),
    ],
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
    assert reader.get_space_variables(SPACE) == {}
    needs = f"'reader' may only read, and GET /api/spaces/{SPACE}/secrets needs the role write"
    with pytest.raises(HfHubHTTPError, match=needs):
        reader.get_space_secrets(SPACE)
    for act in (
        lambda: reader.get_space_secrets(SPACE),
        lambda: reader.add_space_secret(SPACE, "A", "x"),
        lambda: reader.add_space_variable(SPACE, "A", "x"),
        lambda: reader.delete_space_secret(SPACE, "A"),
    ):
        with pytest.raises(HfHubHTTPError) as refused:
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


def test_only_spaces_have_them(hub: RunningHub, space: HfApi) -> None:
    hub.api.create_repo("ada/facts", repo_type="dataset")
    for path in ("/api/datasets/ada/facts/secrets", f"/api/spaces/{SPACE}/secrets/more"):
        assert hub.request("GET", path).status_code == 404
