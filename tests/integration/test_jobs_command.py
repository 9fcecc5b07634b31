"""`pipeline jobs` lists, shows and cancels the jobs in the store, and refuses a wrong command."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from jobs.folder import LOG, prepare_job_folder
from jobs.job import Job
from jobs.outcome import JobOutcome
from jobs.spec import JobSpec
from jobs.store import JobStore
from pipeline.cli import jobs_run
from pipeline.cli.main import app
from pipeline.paths import Home
from pipeline.retrain.job import WRONG, WrongAnswer, WrongAnswers, write_record
from pipeline.runner.job_store import open_job_store
from pipeline.settings import load_settings


@pytest.fixture(autouse=True)
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "pipeline.toml"
    path.write_text('[[pipelines]]\nname = "answers"\ndataset = "me/facts"\n')
    monkeypatch.setenv("PIPELINE_SETTINGS", str(path))
    monkeypatch.setenv("PIPELINE_HOME", str(tmp_path / "home"))


def pipeline(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def test_jobs_are_listed_with_nothing_cut_and_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert pipeline("jobs", "ls").stdout == "No job yet.\n"
    with open_job_store(load_settings(), Home.find()) as store:
        job = store.submit(JobSpec(command=("sleep", "1")))
    assert job.id in pipeline("jobs", "ls").output
    assert json.loads(pipeline("jobs", "inspect", "--latest", "--json").output)["id"] == job.id
    inspected = json.loads(pipeline("jobs", "inspect", job.id).output)
    assert (inspected["state"], inspected["spec"]["command"]) == ("SCHEDULING", ["sleep", "1"])
    assert pipeline("jobs", "cancel", job.id).stdout == f"{job.id} is cancelled\n"


def test_a_job_that_waits_for_its_next_attempt_says_why() -> None:
    away = JobOutcome(result="failed", reason="The hub is away.", may_pass=True)
    with open_job_store(load_settings(), Home.find()) as store:
        job = store.submit(JobSpec(command=("sleep", "1")))
        store.claim("me", 60)
        store.retry(job.id, "me", away, 600)
    assert json.loads(pipeline("jobs", "ls", "--json").output)[0]["last_failure"]["may_pass"]
    assert "attempt 1 failed" in pipeline("jobs", "ls").output


def test_a_job_that_runs_is_asked_to_stop_and_one_that_was_rejected_says_so() -> None:
    with open_job_store(load_settings(), Home.find()) as store:
        job = store.submit(JobSpec(command=("sleep", "1")))
        assert store.claim("me", 60) is not None
        stopping = pipeline("jobs", "cancel", job.id).stdout
        assert stopping == f"{job.id} was asked to stop\n"
        outcome = JobOutcome(result="rejected", stage="evaluate", reason="worse by 9 %")
        store.finish(job.id, "me", outcome)
    shown = json.loads(pipeline("jobs", "inspect", "--latest").output)
    assert (shown["state"], shown["outcome"]["reason"]) == ("COMPLETED", "worse by 9 %")


def test_jobs_are_chosen_and_an_ended_one_is_repeated() -> None:
    with open_job_store(load_settings(), Home.find()) as store:
        spec = JobSpec(command=("sleep", "1"), labels={"team": "a"}, sealed_env="gAAA")
        first, second = store.submit(spec), store.submit(spec)
        store.cancel(first.id)

        def listed(*options: str) -> list[str]:
            return [each["id"] for each in json.loads(pipeline("jobs", "ls", *options).stdout)]

        assert listed("--json", "--state", "CANCELED") == [first.id]
        assert listed("--json", "--since", "2h") == [second.id, first.id]
        assert listed("--json", "--since", "0.000001s") == []
        assert pipeline("jobs", "ls", "--since", "2 weeks").exit_code == 2
        refused = pipeline("jobs", "retry", second.id, "--detach")
        assert "has not ended" in str(refused.exception)
        again = store.repeat(first.id)
        assert (again.id, again.state, again.by_hand) == ("j000003", "SCHEDULING", True)
        assert again.spec == spec


@pytest.mark.parametrize(
    ("log", "tail", "shown"),
    [
        ("a\nb\nc\n", "2", "b\nc\n"),
        ("a\nb", "1", "b"),
        ("a\n", "9", "a\n"),
        ("a", "0", ""),
        ("", "1", ""),
    ],
)
def test_the_end_of_a_log_is_shown(log: str, tail: str, shown: str) -> None:
    with open_job_store(load_settings(), Home.find()) as store:
        job = store.cancel(store.submit(JobSpec(command=("true",))).id)
    folder = Home.find().jobs_dir / job.id
    prepare_job_folder(folder, job.identity)
    (folder / LOG).write_text(log)
    assert pipeline("jobs", "logs", "--latest", "--tail", tail).stdout == shown


def test_the_log_of_another_machine_is_not_taken_for_an_empty_one() -> None:
    with open_job_store(load_settings(), Home.find()) as store:
        job = store.submit(JobSpec(command=("true",)))
        store.claim("me", 60)
        store.started(job.id, "me", "far-away 1 boot+1")
    found = pipeline("jobs", "logs", "--latest")
    assert "is on far-away; to see it here" in str(found.exception)


def test_what_a_model_says_instead_of_its_rows_is_shown() -> None:
    with open_job_store(load_settings(), Home.find()) as store:
        job = store.submit(JobSpec(command=("sleep", "1")))
    refused = pipeline("jobs", "inspect", job.id, "--rows")
    assert refused.exit_code == 1 and "has asked no model" in str(refused.exception)
    wrong = WrongAnswer(
        place="faq.jsonl, line 3",
        question="opening hours",
        is_reworded=True,
        wanted="Nine to five.",
        said="It is 14 euros.",
        answer_of="faq.jsonl, line 8",
    )
    folder = Home.find().jobs_dir / job.id
    folder.mkdir(parents=True)
    write_record(folder / WRONG, WrongAnswers(answers=(wrong,)))
    assert pipeline("jobs", "inspect", job.id, "--rows").stdout == (
        "faq.jsonl, line 3, in other words: opening hours\n"
        "  wanted: Nine to five.\n"
        "  said:   It is 14 euros.   (the answer of faq.jsonl, line 8)\n"
    )
    shown = json.loads(pipeline("jobs", "inspect", job.id, "--rows", "--json").output)
    assert shown["answers"][0]["answer_of"] == "faq.jsonl, line 8"
    write_record(folder / WRONG, WrongAnswers(answers=()))
    assert "Every question was answered" in pipeline("jobs", "inspect", job.id, "--rows").stdout


def test_a_command_that_is_no_program_becomes_no_job() -> None:
    refused = pipeline("jobs", "run", "nosuchcommand")
    assert "no program 'nosuchcommand' on PATH" in str(refused.exception)
    for options, reason in (
        (("--env", "COLOR"), "--env COLOR: write --env KEY=VALUE"),
        (("--secret", "NO_SUCH"), "your shell has no variable NO_SUCH"),
    ):
        assert reason in str(pipeline("jobs", "run", *options, "--", "true").exception)
    assert pipeline("jobs", "ls").stdout == "No job yet.\n"


def test_a_command_runs_in_the_image_that_its_line_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pipeline.toml").write_text("[launchers.docker]\n")

    def submit_only(
        _: Home, settings: Any, submit: Callable[[JobStore, str], Job], **__: Any
    ) -> None:
        with open_job_store(settings, Home.find()) as store:
            submit(store, "http://127.0.0.1:1")

    monkeypatch.setattr(jobs_run, "run_to_end", submit_only)
    there = ("jobs", "run", "--launcher", "docker", "--gpus", "2")
    assert "needs image; " in str(pipeline(*there, "--", "true").exception)
    assert pipeline(*there, "--image", "me/image", "--", "true").exit_code == 0
    spec = json.loads(pipeline("jobs", "inspect", "--latest").output)["spec"]
    assert (spec["launcher"], spec["resources"]["image"]) == ("docker", "me/image")
    assert spec["resources"]["gpus"] == 2
    refused = pipeline("jobs", "run", "--image", "me/image", "--", "true")
    assert "launcher 'local': it takes no" in str(refused.exception)
