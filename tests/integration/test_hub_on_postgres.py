"""The hub's tables on Postgres: what does not go through SQLAlchemy alone, and a lost machine."""

from pathlib import Path

import httpx
import pytest
from huggingface_hub.errors import HfHubHTTPError

from jobs.store import JobStore
from tests.hub_fixtures import create_empty, recording_receiver, running_hub, wait_until
from tests.jobs_fixtures import new_database, postgres_server
from tests.ports import free_port

__all__ = ["postgres_server"]


@pytest.fixture
def url(postgres_server: str) -> str:
    return new_database(postgres_server)


def test_an_event_outlives_its_hub_and_is_delivered_by_one_on_another_machine(
    url: str, tmp_path: Path
) -> None:
    port = free_port()
    address = f"http://127.0.0.1:{port}/webhooks/record"
    disk, other = tmp_path / "network-disk", tmp_path / "other"
    # The job store in the same database has tables of the same names.
    with JobStore.open(url) as store, running_hub(disk, database=url, jobs_store=store) as hub:
        watched = [{"type": "user", "name": "local"}]
        webhook = hub.api.create_webhook(url=address, watched=watched).id
        create_empty(hub.url, "local/facts")
        wait_until(lambda: hub.deliveries(webhook)[0]["error"])
    assert not (disk / "hub.sqlite").exists()
    disk.rename(other)
    with running_hub(other, database=url) as hub, recording_receiver(port) as receiver:
        [told] = receiver.wait_for(1)
        assert told.json["repo"]["name"] == "local/facts"
        wait_until(lambda: hub.deliveries(webhook)[0]["status"] == "delivered")


def test_names_have_no_case_and_a_text_that_cannot_be_stored_is_told(
    url: str, tmp_path: Path
) -> None:
    with running_hub(tmp_path / "hub", database=url) as hub:
        hub.api.create_repo("local/Facts", repo_type="dataset")
        assert hub.api.dataset_info("LOCAL/facts").id == "local/Facts"
        with pytest.raises(HfHubHTTPError, match="already"):
            hub.api.create_repo("local/fACTS", repo_type="dataset")
        answer = hub.request("GET", "/api/datasets/local/fac%00ts")
        assert answer.status_code == httpx.codes.BAD_REQUEST and "NUL" in answer.text
