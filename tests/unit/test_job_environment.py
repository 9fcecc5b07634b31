"""The variables of a job's process. How jobs are run, and where bad settings are refused."""

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from cryptography.fernet import Fernet
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from jobs.errors import LaunchError, SealBroken
from jobs.job import (
    Job,
    inline_payload,
    job_environment,
    seal,
    unseal,
)
from jobs.runner import Runner
from jobs.settings import JobsSettings
from jobs.spec import JobSpec
from jobs.store import JobStore

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(), inner, max_size=5),
    max_leaves=10,
)


def a_job(payload: dict[str, Any] | None = None, **values: Any) -> Job:
    return Job(
        id="j000007",
        state="RUNNING",
        by_hand=False,
        spec=JobSpec(command=("true",), **values),
        payload=payload,
        outcome=None,
        created_at=0,
        run_after=0,
        waits_for=None,
        started_at=0,
        ended_at=None,
        attempt=1,
        num_lost=0,
        owner="me",
        lease_until=1,
        handle=None,
        cancel_requested=False,
    )


def test_the_spec_goes_before_what_the_runner_was_given_and_the_job_before_both() -> None:
    given_ones = {"A": "runner", "B": "runner", "JOB_ID": "runner"}
    job = a_job(env={"B": "spec", "C": "spec", "JOB_ID": "spec", "OMP_NUM_THREADS": "9"})
    shown = job_environment(
        job, Path("/jobs/j000007"), given_ones, num_threads=2, unsealed={"C": "s", "JOB_ID": "s"}
    )
    assert (shown["A"], shown["B"], shown["C"], shown["JOB_ID"]) == ("runner", "spec", "s", job.id)
    assert (shown["OMP_NUM_THREADS"], shown["MKL_NUM_THREADS"]) == ("9", "2")
    assert not any(name.startswith("WEBHOOK") for name in shown)


def test_threads_wait_briefly_unless_the_runner_was_told_otherwise() -> None:
    assert job_environment(a_job(), Path("/"), {}, num_threads=2)["GOMP_SPINCOUNT"] == "3000"
    told = {"GOMP_SPINCOUNT": "7"}
    assert job_environment(a_job(), Path("/"), told, num_threads=2)["GOMP_SPINCOUNT"] == "7"


def test_a_payload_of_another_shape_is_passed_on_without_names_that_it_lacks() -> None:
    job = a_job({"repo": {"name": 3}, "webhook": "w"})
    shown = job_environment(job, Path("/jobs/j000007"), {}, num_threads=1)
    assert json.loads(shown["WEBHOOK_PAYLOAD"]) == job.payload
    assert shown["WEBHOOK_PAYLOAD_FILE"] == "/jobs/j000007/payload.json"
    assert not shown.keys() & {"WEBHOOK_REPO_ID", "WEBHOOK_REPO_TYPE", "WEBHOOK_ID"}


def test_a_cut_payload_keeps_the_commits_and_says_that_it_is_cut() -> None:
    refs = [{"ref": "refs/heads/main", "oldSha": "a" * 40, "newSha": "b" * 40}]
    payload = {
        "event": {"action": "update", "scope": "repo.content"},
        "updatedRefs": refs,
        "updatedFiles": [{"path": "é" * 50, "n": n} for n in range(20_000)],
        "comment": {"content": "x" * 200_000},
    }
    cut = json.loads(inline_payload(payload))
    assert cut["updatedRefs"] == refs and cut["event"] == payload["event"]
    assert cut["truncated"] is True and cut.keys().isdisjoint({"updatedFiles", "comment"})


@settings(max_examples=50, deadline=None)
@given(payload=st.dictionaries(st.text(), JSON, max_size=5), max_bytes=st.integers(60, 500))
def test_an_inline_payload_is_valid_and_fits(payload: dict[str, Any], max_bytes: int) -> None:
    inline = inline_payload(payload, max_bytes)
    assert len(inline.encode()) <= max_bytes
    fits = len(json.dumps(payload)) <= max_bytes
    assert json.loads(inline) == payload if fits else json.loads(inline)["truncated"] is True


def test_a_sealed_token_shows_nothing_and_opens_with_its_key_only() -> None:
    key = Fernet.generate_key()
    token = seal({"TOKEN": "s3cret"}, key)
    assert "s3cret" not in token and "TOKEN" not in token
    assert unseal(token, key) == {"TOKEN": "s3cret"}
    with pytest.raises(SealBroken, match="another key"):
        unseal(token, Fernet.generate_key())
    with pytest.raises(SealBroken, match="no key"):
        unseal(token, None)


def test_a_job_may_use_all_cores() -> None:
    assert JobsSettings().threads() == len(os.sched_getaffinity(0))
    assert JobsSettings(num_threads=7).threads() == 7


@pytest.mark.parametrize(
    "values",
    [
        *({"max_running": 0}, {"lease_seconds": 0}, {"num_threads": 0}, {"max_runing": 2}),
        {"heartbeat_seconds": 2, "lease_seconds": 2},
    ],
)
def test_a_bad_setting_is_refused(values: dict[str, int]) -> None:
    with pytest.raises(ValidationError, match=next(iter(values))):
        JobsSettings.model_validate(values)


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with JobStore.open(tmp_path / "jobs.db") as store:
        runner = Runner(store, tmp_path / "file" / "jobs", JobsSettings(), {})
        with pytest.raises(LaunchError, match=r"file/jobs: Not a directory"):
            runner.run(threading.Event(), until_idle=True)
