"""The management library against the embedded hub itself, jobs and suspensions included."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs.spec import JobSpec
from jobs.store import JobStore
from receiver import webhooks
from receiver.errors import NotAllowed, WebhookApiError, WebhookNotFound
from tests.hub_fixtures import RunningHub, commit_file, recording_receiver, running_hub, wait_until

URL = "http://127.0.0.1:7860/webhooks/retrain"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[JobStore]:
    with JobStore.open(tmp_path / "jobs.sqlite") as store:
        yield store


@pytest.fixture
def hub(tmp_path: Path, store: JobStore) -> Iterator[RunningHub]:
    with running_hub(
        tmp_path / "hub",
        jobs_store=store,
        delivery_schedule_seconds=(0, *[60] * 20),
        suspend_after_seconds=0,
    ) as hub:
        yield hub


@pytest.fixture
def at(hub: RunningHub) -> dict[str, str]:
    return {"endpoint": hub.url, "token": hub.token}


def test_a_webhooks_life(at: dict[str, str]) -> None:
    made = webhooks.create_webhook(
        url=URL,
        watched=["dataset:acme/answers", {"type": "org", "name": "acme"}],
        domains=["repo"],
        secret="s3cret",
        **at,
    )
    assert (made.url, made.status, made.secret) == (URL, "enabled", "s3cret")
    assert made.domains == ("repo",)
    kept = made.model_copy(update={"secret": None})
    assert webhooks.list_webhooks(**at) == (kept,)
    assert webhooks.get_webhook(made.id, **at) == kept
    moved = webhooks.update_webhook(made.id, url=URL + "2", **at)
    assert moved == kept.model_copy(update={"url": URL + "2"}), "the rest is left alone"
    watching = webhooks.update_webhook(made.id, watched=["user:ann"], **at)
    assert [str(item) for item in watching.watched] == ["user:ann"]
    assert webhooks.disable_webhook(made.id, **at).status == "disabled"
    assert webhooks.enable_webhook(made.id, **at).status == "enabled"
    webhooks.delete_webhook(made.id, **at)
    assert webhooks.list_webhooks(**at) == ()


def test_a_webhook_that_starts_a_job(at: dict[str, str], store: JobStore) -> None:
    job = store.submit(JobSpec(command=("true",)))
    made = webhooks.create_webhook(job_id=job.id, watched=["user:ann"], **at)
    assert made.url is None
    assert made.job is not None and made.job["sourceId"] == job.id


def test_a_suspension_is_told_and_ended(
    at: dict[str, str], hub: RunningHub, tmp_path: Path
) -> None:
    with recording_receiver() as receiver:
        receiver.answers.append((500, {}))
        made = webhooks.create_webhook(url=receiver.url, watched=["user:local"], **at)
        remote = hub.create_dataset("local/facts")
        wait_until(lambda: webhooks.get_webhook(made.id, **at).status == "suspended")
        hub.git("init", "-q", "facts", cwd=tmp_path)
        commit_file(hub, tmp_path / "facts", "a.txt", "1")
        hub.git("push", "-q", remote, "main", cwd=tmp_path / "facts")
        assert webhooks.enable_webhook(made.id, **at).status == "enabled"
        receiver.wait_for(3)


def test_what_the_hub_refuses(at: dict[str, str]) -> None:
    for call in (
        webhooks.get_webhook,
        webhooks.update_webhook,
        webhooks.enable_webhook,
        webhooks.disable_webhook,
        webhooks.delete_webhook,
    ):
        with pytest.raises(WebhookNotFound, match="'nothing'"):
            call("nothing", **at)
    with pytest.raises(NotAllowed, match="401"):
        webhooks.list_webhooks(endpoint=at["endpoint"], token="wrong")
    with pytest.raises(WebhookApiError, match="no webhook may call"):
        webhooks.create_webhook(url="http://169.254.169.254/", watched=["user:a"], **at)
    with pytest.raises(WebhookApiError, match="j000009"):
        webhooks.create_webhook(job_id="j000009", watched=["user:a"], **at)
