"""The webhook that `pipeline up` makes on another hub. A second embedded hub stands for it."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jobs.process import identify
from pipeline.doctor.checks import check_other_hubs
from pipeline.doctor.facts import Facts
from pipeline.paths import Home
from pipeline.settings import PipelineSettings, Settings
from pipeline.stack.record import StackRecord, restart
from pipeline.stack.subscriptions import (
    hub_credentials,
    subscribe_at_other_hubs,
)
from pipeline.tokens import Tokens, load_tokens
from receiver.settings import ReceiverSettings
from receiver.tunnel import HubCredentials, remembered_urls
from tests.hub_fixtures import RunningHub, running_hub

OWN_TOKEN = "hf_of_elsewhere"


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningHub]:
    with running_hub(tmp_path_factory.mktemp("elsewhere"), token=OWN_TOKEN) as hub:
        for name in ("answers", "facts"):
            hub.api.create_repo(f"ada/{name}", repo_type="dataset")
        yield hub
        assert all(webhook.url == "https://mine.example/" for webhook in hub.api.list_webhooks())


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    monkeypatch.setenv("PIPELINE_SETTINGS", str(tmp_path / "pipeline.toml"))
    monkeypatch.setenv("HF_TOKEN", OWN_TOKEN)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    return Home(tmp_path)


@pytest.fixture
def tokens(home: Home) -> Tokens:
    return load_tokens(home.tokens_file)


def following(hub: str, *names: str, **receiver: Any) -> Settings:
    pipelines = tuple(
        PipelineSettings(name=name, dataset=f"ada/{name}", dataset_endpoint=hub) for name in names
    )
    return Settings.model_construct(pipelines=pipelines, receiver=ReceiverSettings(**receiver))


def test_the_webhook_is_created_once_and_then_corrected(
    elsewhere: RunningHub, home: Home, tokens: Tokens
) -> None:
    mine = elsewhere.api.create_webhook(
        url="https://mine.example/", watched=[{"type": "user", "name": "ada"}]
    )
    (line,) = subscribe_at_other_hubs(following(elsewhere.url, "answers"), home, tokens)
    (ours,) = [each for each in elsewhere.api.list_webhooks() if each.id != mine.id]
    url = f"{Settings().receiver_url}/webhooks/retrain"
    assert line == f"{elsewhere.url} reports pushes to ada/answers: {ours.id} posts to {url}"
    assert (ours.url, [each.name for each in ours.watched]) == (url, ["ada/answers"])

    (line,) = subscribe_at_other_hubs(following(elsewhere.url, "answers", "facts"), home, tokens)
    assert ours.id in line
    (again,) = [each for each in elsewhere.api.list_webhooks() if each.id != mine.id]
    assert [each.name for each in again.watched] == ["ada/answers", "ada/facts"]

    by_a_person: list[Any] = [{"type": "dataset", "name": name} for name in ("ada/x", "Ada/FACTS")]
    elsewhere.api.update_webhook(ours.id, watched=by_a_person, domains=["discussion"])
    (line,) = subscribe_at_other_hubs(following(elsewhere.url, "answers", "facts"), home, tokens)
    kept = elsewhere.api.get_webhook(ours.id)
    assert [each.name for each in kept.watched] == ["ada/x", "Ada/FACTS", "ada/answers"]
    assert kept.domains == ["discussion", "repo"]
    elsewhere.api.delete_webhook(ours.id)


def test_the_public_url_is_what_the_settings_or_the_tunnel_say(
    elsewhere: RunningHub, home: Home, tokens: Tokens
) -> None:
    def posts_to(**receiver: Any) -> list[str | None]:
        settings = following(elsewhere.url, "answers", **receiver)
        (line,) = subscribe_at_other_hubs(settings, home, tokens)
        made = [each for each in elsewhere.api.list_webhooks() if each.id in line]
        for webhook in made:
            elsewhere.api.delete_webhook(webhook.id)
        return [each.url for each in made]

    assert posts_to(public_url="https://x.example/") == ["https://x.example/webhooks/retrain"]
    tunnel = {"tunnel": "relay http://{address}"}
    assert posts_to(**tunnel) == [], "the receiver has not written its URL"
    remembered_urls(home.root, ReceiverSettings().port).write_text(
        '["https://t2.example", "https://t1.example"]'
    )
    assert posts_to(**tunnel) == ["https://t2.example/webhooks/retrain"]


def test_what_the_user_must_do_is_said(
    elsewhere: RunningHub, home: Home, tokens: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    def line(settings: Settings) -> str:
        (told,) = subscribe_at_other_hubs(settings, home, tokens)
        assert tokens.webhook not in told
        return told

    assert line(following("https://hub.example", "answers")) == (
        "https://hub.example cannot reach this receiver to report pushes to ada/answers; set"
        " `tunnel` or `public_url` under [receiver], then pipeline down and pipeline up; until"
        " then, train by hand: pipeline jobs run"
    )
    by_hand = (
        f"HF_TOKEN=… pipeline webhooks create --endpoint {elsewhere.url} --url"
        f" {Settings().receiver_url}/webhooks/retrain --watch dataset:ada/answers --domain repo"
    )
    settings = following(elsewhere.url, "answers")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert " refused the token (401" in line(settings)
    assert by_hand in line(settings)
    monkeypatch.setenv("HF_TOKEN", tokens.hub)  # as in a shell after `eval "$(pipeline env)"`
    assert f"no token for {elsewhere.url}, which has ada/answers; run `hf auth" in line(settings)
    of_stack = HubCredentials(endpoint=settings.hub_url, token=tokens.hub)
    assert hub_credentials(settings, home, tokens) == [of_stack]
    monkeypatch.setenv("HF_TOKEN", OWN_TOKEN)
    assert "cannot be reached" in line(following("http://127.0.0.1:9", "answers"))


def test_doctor_says_what_keeps_a_hub_from_telling(
    elsewhere: RunningHub, home: Home, tokens: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = following(elsewhere.url, "answers")

    def found() -> list[tuple[str, str]]:
        checked = check_other_hubs(Facts(home, settings))
        return [(each.message, each.next_step) for each in checked]

    assert found() == [], "no stack is up"
    me = identify(os.getpid())
    assert me is not None
    record = StackRecord(process=me, started_at=0.0, is_ready=True, children=())
    home.stack_file.write_text(record.model_dump_json())
    missing = f"no webhook at {elsewhere.url} reports pushes to ada/answers"
    assert found() == [(missing, restart(home))]

    (line,) = subscribe_at_other_hubs(settings, home, tokens)
    (ours,) = [each for each in elsewhere.api.list_webhooks() if each.id in line]
    other_case: list[Any] = [{"type": "dataset", "name": "Ada/ANSWERS"}]
    elsewhere.api.update_webhook(ours.id, watched=other_case)
    assert found() == []
    elsewhere.api.disable_webhook(ours.id)
    enable = f"pipeline webhooks enable {ours.id} --endpoint {elsewhere.url}"
    disabled = f"it delivers to {ours.url}, but is disabled, so pushes start no jobs"
    assert found() == [(f"{ours.id} at {elsewhere.url}: {disabled}", enable)]
    elsewhere.api.delete_webhook(ours.id)
    monkeypatch.delenv("HF_TOKEN")
    [(message, step)] = found()
    assert f"there is no token for {elsewhere.url}" in message
    assert step.endswith("then pipeline down, then pipeline up")
