"""`pipeline jobs wait --commit`: the job of a push, whichever job that became."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from jobs.counts import Counts
from jobs.outcome import JobOutcome
from jobs.store import JobStore
from pipeline.cli import jobs
from pipeline.cli.main import app
from pipeline.paths import Home
from pipeline.runner.job_store import open_job_store
from pipeline.settings import load_settings
from pipeline.tokens import load_tokens
from tests.hub_fixtures import commit_file, push_file, running_hub
from tests.jobs_fixtures import DONE, FAILED, claim, delivery, spec

A, B = "a" * 40, "b" * 40


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[JobStore]:
    monkeypatch.setenv("PIPELINE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PIPELINE_SETTINGS", str(tmp_path / "pipeline.toml"))
    monkeypatch.chdir(tmp_path)
    with open_job_store(load_settings(), Home.find()) as opened:
        yield opened


def wait(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["jobs", "wait", *arguments])


def end(store: JobStore, outcome: JobOutcome) -> None:
    store.finish(claim(store).id, "me", outcome)


def test_it_goes_on_with_the_job_that_took_over(store: JobStore) -> None:
    store.submit(spec(A), delivery=delivery("d1"))
    assert store.claim("me", 60) is not None
    later = store.submit(spec(B, A), delivery=delivery("d2"))
    store.finish("j000001", "me", FAILED)
    end(store, JobOutcome(result="rejected", reason="It is worse."))
    waited = wait("--commit", A, "--json")
    assert (json.loads(waited.stdout)["id"], waited.exit_code) == (later.id, 3)


def test_it_waits_for_the_push_to_arrive(store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.submit(spec(A), delivery=delivery("d1"))
    end(store, DONE)
    find = jobs._job_of_commit

    def find_and_push(*arguments: Any) -> object:
        found = find(*arguments)
        if found is None:
            store.submit(spec(B, A), delivery=delivery("d2"))
            end(store, DONE)
        return found

    monkeypatch.setattr(jobs, "_job_of_commit", find_and_push)
    waited = wait("--commit", B)
    assert waited.exit_code == 0 and waited.stdout.splitlines()[-1].startswith("j000002")


def test_a_commit_in_the_middle_of_a_push_is_waited_for(
    store: JobStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub answers whether the head that was trained contains it."""
    home = Home.find()
    with running_hub(tmp_path / "hub") as hub:
        monkeypatch.setenv("PIPELINE_HUB__PORT", str(hub.settings.port))
        tokens = load_tokens(home.tokens_file).model_copy(update={"hub": hub.token})
        home.tokens_file.write_text(tokens.model_dump_json())
        clone = tmp_path / "clone"
        hub.git("clone", "-q", hub.create_dataset("acme/faq"), str(clone), cwd=tmp_path)
        middle = commit_file(hub, clone, "a.jsonl", "{}")
        head = push_file(hub, clone, "b.jsonl", "{}")
        job = store.submit(spec(head), by_hand=True)
        end(store, DONE)
        waited = wait("--commit", middle, "--json")
        assert (json.loads(waited.stdout)["id"], waited.exit_code) == (job.id, 0)
        later = push_file(hub, clone, "c.jsonl", "{}")
        assert wait("--commit", later, "--timeout", "0.5").exit_code == 124, "it is not trained yet"


def test_head_is_that_of_the_clone_in_this_folder(store: JobStore, tmp_path: Path) -> None:
    refused = wait("--commit", "HEAD").exception
    assert "change to a clone of the dataset" in str(refused)
    git = ["git", "-c", "user.name=me", "-c", "user.email=me@example.com"]
    subprocess.run([*git, "init", "-q", "."], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "rows"], check=True)
    asked = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    store.submit(spec(asked.stdout.strip()), delivery=delivery("d1"))
    end(store, DONE)
    assert wait("--commit", "HEAD").exit_code == 0
    assert wait("--commit", asked.stdout[:8]).exit_code == 0


def test_a_commit_that_leads_to_no_job_is_no_endless_wait(
    store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed_out = wait("--commit", A, "--timeout", "0.05")
    assert timed_out.exit_code == 124 and "no job for commit aaaaaaaa" in timed_out.stderr
    monkeypatch.setattr(jobs, "ARRIVAL_SECONDS", 0.05)
    assert "no push of commit aaaaaaaa has led to a job" in str(wait("--commit", A).exception)


def test_several_pipelines_of_one_dataset_are_told_apart(store: JobStore) -> None:
    for name in ("poems", "facts"):
        store.submit(spec(A, pipeline=name), delivery=delivery("d1", f"w/{name}"))
    end(store, DONE)
    end(store, FAILED)
    assert "facts, poems; add --pipeline NAME" in str(wait("--commit", A).exception)
    assert wait("--commit", A, "--pipeline", "poems").exit_code == 0
    assert wait("--commit", A, "--pipeline", "facts").exit_code == 1


def test_a_pipeline_without_a_commit_is_refused(store: JobStore) -> None:
    """Ignored, the newest job of another pipeline would be waited for."""
    store.submit(spec(A), delivery=delivery("d1"))
    refused = wait("--latest", "--pipeline", "other")
    assert refused.exit_code == 1
    assert "--pipeline other works only with --commit" in str(refused.exception)


def test_counts_are_told_wherever_a_job_is_shown(store: JobStore) -> None:
    counts = Counts(changed=60, learned=58, learned_before=3)
    store.submit(spec(A), delivery=delivery("d1"))
    end(store, JobOutcome(result="promoted", counts=counts))
    for command in (["wait", "--latest"], ["ls"]):
        shown = CliRunner().invoke(app, ["jobs", *command]).stdout
        assert "learned 58 of 60 (3 before)" in shown, command


def test_a_plain_command_passes_its_exit_code_on(store: JobStore) -> None:
    for code, seen in ((7, 7), (-15, 143)):
        store.submit(spec(pipeline=None))
        end(store, JobOutcome(result="failed", exit_code=code))
        assert wait("--latest").exit_code == seen
    store.submit(spec(pipeline=None))
    end(store, JobOutcome(result="cancelled"))
    assert wait("--latest").exit_code == 5
