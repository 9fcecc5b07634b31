"""The webhook that `pipeline up` makes on the stack's own hub."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.hub.errors import BadRequest
from pipeline.paths import Home
from pipeline.settings import PipelineSettings, Settings
from pipeline.stack.subscriptions import ROUTE, subscribe
from pipeline.tokens import Tokens, load_tokens
from receiver.settings import ReceiverSettings
from tests.hub_fixtures import TOKEN, RunningHub, push_file, running_hub

FOLLOWING = (PipelineSettings(name="facts", dataset="local/facts"),)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[RunningHub]:
    with running_hub(tmp_path / "hub") as hub:
        yield hub


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


@pytest.fixture
def tokens(home: Home) -> Tokens:
    return load_tokens(home.tokens_file).model_copy(update={"hub": TOKEN})


def settings_of(hub: RunningHub, port: int, *pipelines: PipelineSettings) -> Settings:
    receiver = ReceiverSettings(port=port)
    return Settings.model_construct(hub=hub.settings, receiver=receiver, pipelines=pipelines)


def urls(hub: RunningHub) -> list[str | None]:
    return [webhook.url for webhook in hub.api.list_webhooks()]


def test_the_webhook_of_another_stack_stays(hub: RunningHub, home: Home, tokens: Tokens) -> None:
    hub.create_dataset("local/facts")
    theirs = f"http://127.0.0.1:9{ROUTE}"
    watched: list[Any] = [{"type": "dataset", "name": "local/facts"}]
    hub.api.create_webhook(url=theirs, watched=watched, secret="theirs")
    subscribe(settings_of(hub, 8001, *FOLLOWING), home, tokens)
    assert urls(hub) == [theirs, f"http://127.0.0.1:8001{ROUTE}"]
    subscribe(settings_of(hub, 8001), home, tokens)
    assert urls(hub) == [theirs]


def test_a_webhook_that_was_deleted_is_made_again(
    hub: RunningHub, home: Home, tokens: Tokens
) -> None:
    settings = settings_of(hub, 8001, *FOLLOWING)
    subscribe(settings, home, tokens)
    [made] = hub.api.list_webhooks()
    hub.api.delete_webhook(made.id)
    subscribe(settings, home, tokens)
    [again] = hub.api.list_webhooks()
    assert again.id != made.id


def test_a_hub_has_the_followed_datasets_from_its_start(tmp_path: Path) -> None:
    root = tmp_path / "hub"
    with running_hub(root, datasets=["local/facts"]) as hub:
        hub.git("clone", "-q", f"{hub.url}/datasets/local/facts", "facts", cwd=tmp_path)
        head = push_file(hub, tmp_path / "facts", "rows.jsonl", "{}\n")
    with running_hub(root, datasets=["local/Facts"]) as hub:
        assert [each.id for each in hub.api.list_datasets()] == ["local/facts"]
        assert hub.api.dataset_info("local/facts").sha == head
    no_name = "No repository can be called api/facts: "
    with pytest.raises(BadRequest, match=no_name), running_hub(root, datasets=["api/facts"]):
        pass
