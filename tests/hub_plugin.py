"""Fixtures of the hub's tests, and of any that need one; what they yield is in `hub_fixtures`."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs.store import JobStore
from tests.hub_fixtures import Receiver, RunningHub, recording_receiver, running_hub


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[RunningHub]:
    with running_hub(
        tmp_path / "hub",
        delivery_schedule_seconds=(0, 0.05, 0.05, 0.05),
        refused_seconds=0.1,
        delivery_timeout_seconds=5,
    ) as hub:
        yield hub


@pytest.fixture
def store(tmp_path: Path) -> Iterator[JobStore]:
    """For a hub with jobs."""
    with JobStore.open(tmp_path / "jobs.sqlite") as store:
        yield store


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with recording_receiver() as receiver:
        yield receiver


@pytest.fixture
def worktree(hub: RunningHub, tmp_path: Path) -> Path:
    """A clone of the new, empty dataset `local/facts`, with `origin` set."""
    hub.git("clone", "-q", hub.create_dataset("local/facts"), "facts", cwd=tmp_path)
    return tmp_path / "facts"


@pytest.fixture
def webhook(hub: RunningHub, receiver: Receiver, worktree: Path) -> str:
    """The id of a webhook that tells `receiver` of what `local` owns, made after `worktree`."""
    created = hub.api.create_webhook(
        url=receiver.url, watched=[{"type": "user", "name": "local"}], secret="whsec_c2VjcmV0"
    )
    return created.id
