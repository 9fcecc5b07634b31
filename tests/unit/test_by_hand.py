"""Where a job by hand finds its hub, what its runner imports ahead, and which commit a release
names if a command that an event started publishes it."""

import importlib.util
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.fernet import Fernet
from starlette.responses import Response
from starlette.types import ASGIApp

from jobs.errors import HeadAway, NoHead
from jobs.process import identify
from jobs.spec import JobSpec, RevisionRange
from pipeline.errors import PipelineError
from pipeline.paths import Home
from pipeline.runner import by_hand, run
from pipeline.runner.attempt_variables import user_token_variable, variables_here
from pipeline.runner.by_hand import with_runner
from pipeline.runner.job_store import open_job_store
from pipeline.runner.submit import (
    ask_head,
    push_payload,
    source_of,
    submit_retraining,
)
from pipeline.runner.this_job import lineage_of_job
from pipeline.settings import PipelineSettings, Settings, load_settings
from pipeline.stack.record import Child, StackRecord
from pipeline.stack.supervisor import Stack
from pipeline.tokens import Tokens, load_tokens
from tests.jobs_fixtures import until
from tests.receiver_fixtures import serve
from tests.receiver_payloads import dataset_update, ref_update

__all__ = ["serve"]


@pytest.mark.parametrize("url", ["http://127.0.0.1:1234", None])
def test_the_hub_is_that_of_whatever_runs_here(url: str | None, tmp_path: Path) -> None:
    me = identify(os.getpid())
    assert me is not None
    record = StackRecord(
        process=me,
        started_at=0.0,
        is_ready=False,
        children=(Child(name="hub", process=None, url=url),),
    )
    home, settings = Home(tmp_path), Settings()
    home.stack_file.write_text(record.model_dump_json())
    with with_runner(home, settings, detach=False) as found:
        assert found == (url or settings.hub_url)


def test_a_hub_that_does_not_answer_is_named(tmp_path: Path) -> None:
    facts = PipelineSettings(name="facts", dataset="local/facts", port=8000)
    home, settings = Home(tmp_path), Settings()
    with (
        open_job_store(settings, home) as store,
        pytest.raises(
            HeadAway, match=r"main of local/facts could not be fetched from http://127\.0\.0\.1:9: "
        ),
    ):
        submit_retraining(store, home, settings, hub_url="http://127.0.0.1:9", pipeline=facts)


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [(503, "{}", HeadAway), (200, "a page", HeadAway), (200, "{}", NoHead), (404, "{}", NoHead)],
)
def test_a_program_that_is_no_hub_fails_a_job_only_if_it_speaks_for_one(
    serve: Callable[[ASGIApp], str], status: int, body: str, kind: type[Exception]
) -> None:
    source = source_of("local/facts", None, serve(Response(body, status)), "hf_x")
    with pytest.raises(kind):
        ask_head(source, "refs/heads/main")


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        ({"event": {"action": "explode"}}, "is not the payload of a webhook: event.scope: "),
        (dataset_update() | {"updatedRefs": []}, "names no commit of refs/heads/main"),
    ],
)
def test_a_payload_that_names_no_commit_is_refused(
    payload: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    facts = PipelineSettings(name="facts", dataset="local/facts", port=8000)
    home, settings, hub_url = Home(tmp_path), Settings(), "http://127.0.0.1:9"
    with open_job_store(settings, home) as store:
        with pytest.raises(PipelineError, match=reason):
            submit_retraining(
                store, home, settings, hub_url=hub_url, pipeline=facts, payload=payload
            )
        assert store.list() == []


@pytest.mark.parametrize(
    ("variable", "given"),
    [("hf_mine", {"OWN_HF_TOKEN": "hf_mine"}), ("stack", {}), ("", {})],
)
def test_jobs_get_the_users_own_token_and_never_the_stacks_for_it(
    monkeypatch: pytest.MonkeyPatch, variable: str, given: dict[str, str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", variable)
    tokens = Tokens(hub="stack", admin="a", webhook="w", key="k")
    assert user_token_variable(tokens) == given


@pytest.mark.parametrize(
    ("starts_it", "secret"),
    [
        ({"payload": {"event": {"action": "update"}}}, "of-the-stacks-webhook"),
        ({"payload": {"event": {"action": "update"}}, "by_hand": True}, None),
        ({}, None),
        # The hub has already encrypted the other webhook's own secret into the job's `sealed_env`.
        ({"payload": {}, "labels": {"webhook": "w1"}}, None),
    ],
    ids=["a push", "a job by hand", "a plain command", "a copy for another webhook"],
)
def test_only_a_job_of_the_stacks_webhook_gets_its_secret(
    tmp_path: Path, starts_it: dict[str, Any], secret: str | None
) -> None:
    spec = JobSpec(command=("true",), labels=starts_it.pop("labels", {}))
    with open_job_store(Settings(), Home(tmp_path)) as store:
        job = store.submit(spec, **starts_it)
    key = Fernet.generate_key().decode()
    tokens = Tokens(hub="h", admin="a", webhook="of-the-stacks-webhook", key=key)
    variables = variables_here(job, tokens)
    assert variables.pop("WEBHOOK_SECRET", None) == secret
    assert set(variables) == {"HF_TOKEN", "PIPELINE_ADMIN_TOKEN"}


def test_a_job_sees_none_of_the_services_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Home(tmp_path)
    key = Fernet.generate_key().decode()
    hidden = {
        "WEBHOOK_SECRET": "of-the-shell",
        "PIPELINE_SECRET_KEY": key,
        "PIPELINE_SERVING__API_KEY": "of-the-server",
    }
    for name, value in (hidden | {"PIPELINE_JOBS__PRELOAD": "[]", "COLOR": "blue"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(run.signal, "signal", lambda *_: None)
    monkeypatch.setattr(run, "log_to_stderr", lambda *_: None)
    load_tokens(home.tokens_file)
    with open_job_store(load_settings(), home) as store:
        job = store.submit(JobSpec(command=("sh", "-c", "env > seen")))
    run.run_jobs(home, until_idle=True, with_hub=False)
    seen = (home.jobs_dir / job.id / "seen").read_text()
    assert "COLOR=blue" in seen
    assert [name for name, value in hidden.items() if name in seen or value in seen] == []


def test_the_payload_of_a_pipelines_first_job_says_that_nothing_came_before() -> None:
    revisions = RevisionRange(repo="local/facts", ref="refs/heads/main", new_sha="b" * 40)
    source = source_of("local/facts", None, "http://hub", "hf_token")
    payload = push_payload(source, revisions, None, "retrain")
    assert payload["updatedRefs"] == [
        {"ref": "refs/heads/main", "oldSha": None, "newSha": "b" * 40}
    ]
    assert payload["repo"]["headSha"] == "b" * 40


def test_an_error_of_one_check_does_not_end_the_checks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks: list[Stack] = []

    def fail_once(stack: Stack) -> list[str]:
        checks.append(stack)
        if len(checks) == 1:
            raise ValueError("nobody expected this")
        return []

    monkeypatch.setattr(Stack, "check_services", fail_once)
    monkeypatch.setattr(by_hand, "CHECK_SECONDS", 0.01)
    monkeypatch.setattr(by_hand, "SECONDS_AFTER_ERROR", 0.01)
    with by_hand.running_services([], Home(tmp_path), Settings()):
        until(lambda: len(checks) > 1)


def test_every_module_to_preload_exists() -> None:
    """The warm parent ends at an import that fails, and each job would then start cold."""
    assert [name for name in run.PRELOAD if importlib.util.find_spec(name) is None] == []


def test_a_push_of_two_refs_gives_the_commit_of_the_followed_one(tmp_path: Path) -> None:
    pushed = (ref_update("refs/heads/side", new="a" * 40), ref_update(new="b" * 40))
    payload = tmp_path / "payload.json"
    payload.write_text(json.dumps(dataset_update(*pushed)))
    (tmp_path / "spec.json").write_text(JobSpec(command=("true",)).model_dump_json())
    environment = {
        "JOB_ID": "j1",
        "JOB_DIR": str(tmp_path),
        "WEBHOOK_PAYLOAD_FILE": str(payload),
    }
    for followed, expected in (
        ("refs/heads/main", ("refs/heads/main", "b" * 40)),
        ("refs/heads/side", ("refs/heads/side", "a" * 40)),
        ("refs/heads/none", ("refs/heads/side", "a" * 40)),
    ):
        found = lineage_of_job(environment, followed)
        assert (found.dataset_ref, found.dataset_revision) == expected
