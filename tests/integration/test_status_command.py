"""What `pipeline status` and `pipeline doctor` say of a stack that is up, with a real hub."""

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from jobs.errors import NoHead
from jobs.process import identify
from jobs.spec import JobSpec, RevisionRange
from pipeline.cli.main import app
from pipeline.paths import Home
from pipeline.runner.job_store import open_job_store
from pipeline.runner.submit import submit_retraining
from pipeline.settings import load_settings, write_settings_copy
from pipeline.stack.record import Child, StackRecord, read_stack
from pipeline.stack.subscriptions import subscribe
from pipeline.tokens import load_tokens
from serving.engines import settings as engine_settings
from serving.weights import release_store
from tests.hub_fixtures import (
    SECRET_KEY,
    Receiver,
    RunningHub,
    push_file,
    running_hub,
    wait_until,
)
from tests.ports import free_ports
from tests.serving_fixtures import echo_app, echo_release, running

pytest_plugins = ["tests.hub_plugin"]

PIPELINE = '[[pipelines]]\nname = "facts"\ndataset = "local/facts"\n'


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningHub]:
    """The hub of a stack that this process stands for."""
    failing: dict[str, Any] = {
        "delivery_schedule_seconds": (0, 60),
        "suspend_after_seconds": 0,
    }
    with running_hub(tmp_path / "hub", **failing) as hub:
        settings, home = tmp_path / "pipeline.toml", Home(tmp_path / ".pipeline")
        settings.write_text(PIPELINE)
        home.root.mkdir()
        tokens = {"hub": hub.token, "admin": "a", "webhook": "w", "key": SECRET_KEY.decode()}
        home.tokens_file.write_text(json.dumps(tokens))
        for name, value in {
            "PIPELINE_HOME": str(home.root),
            "PIPELINE_SETTINGS": str(settings),
            "PIPELINE_HUB__PORT": str(hub.settings.port),
            "PIPELINE_SERVING__PORT": str(*free_ports(1)),
        }.items():
            monkeypatch.setenv(name, value)
        me = identify(os.getpid())
        assert me is not None
        record = StackRecord(process=me, started_at=0.0, is_ready=True)
        write_settings_copy(home)
        home.stack_file.write_text(record.model_dump_json())
        yield hub


def pipeline(*arguments: str) -> str:
    return CliRunner().invoke(app, list(arguments)).stdout


def wrong() -> list[tuple[str, str]]:
    found = json.loads(pipeline("doctor", "--json"))
    return [(each["message"], each["next_step"]) for each in found]


def clone(hub: RunningHub, folder: Path) -> Path:
    remote, worktree = hub.create_dataset("local/facts"), folder / "facts"
    hub.git("clone", "--quiet", remote, str(worktree), cwd=folder)
    return worktree


def push(hub: RunningHub, worktree: Path, branch: str = "main") -> str:
    """Pushes a commit that changes no row. Returns its sha."""
    hub.git("commit", "--quiet", "--allow-empty", "-m", "words", cwd=worktree)
    hub.git("push", "--quiet", "origin", f"HEAD:refs/heads/{branch}", cwd=worktree)
    return hub.git("rev-parse", "HEAD", cwd=worktree)


def training_on(commit: str) -> JobSpec:
    range = RevisionRange(repo="local/facts", ref="refs/heads/main", new_sha=commit)
    return JobSpec(command=("true",), pipeline="facts", revisions=range)


def test_what_keeps_pushes_from_starting_jobs_is_told_with_what_is_down(hub: RunningHub) -> None:
    hub.create_dataset("local/facts")
    home, settings = Home.find(), load_settings()
    record = read_stack(home)
    assert record is not None
    down = Child(name="receiver", process=None, url=settings.receiver_url)
    home.stack_file.write_text(record.model_copy(update={"children": (down,)}).model_dump_json())
    subscribe(settings, home, load_tokens(home.tokens_file))
    [own] = hub.api.list_webhooks()

    def said() -> str:
        return "; ".join(dict(wrong()))

    assert "it is down, and will be started again" in said() and own.id not in said()
    hub.api.update_webhook(own.id, url="http://127.0.0.1:9/")
    delivers = "it delivers to http://127.0.0.1:9/, but the receiver is at"
    message = f"{own.id} at {hub.url}: {delivers} {own.url}"
    assert dict(wrong())[message] == "pipeline down && pipeline up --detach"
    subscribe(settings, home, load_tokens(home.tokens_file))
    other: list[Any] = [{"type": "dataset", "name": "local/other"}]
    hub.api.update_webhook(own.id, watched=other)
    assert f"{own.id} at {hub.url}: it does not watch local/facts" in said()
    home.tokens_file.chmod(0o644)
    assert "644" in said()
    status = json.loads(pipeline("status", "--json"))
    assert status["uptime_seconds"] > 0 and status["services"][0]["restarts"] == 0


def test_the_engine_is_named_with_the_reason(
    hub: RunningHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_settings, "_DEVICES", tmp_path)
    assert "engine torch, because no NVIDIA GPU is visible" in pipeline("status")
    monkeypatch.setenv("PIPELINE_SERVING__ENGINE", "vllm")
    assert "engine vllm, because the settings say so" in pipeline("status")


def test_a_suspended_webhook_is_loud(hub: RunningHub, receiver: Receiver) -> None:
    hub.create_dataset("local/facts")
    receiver.answers = [(503, {})] * 100
    id = hub.api.create_webhook(
        url=receiver.url, watched=[{"type": "dataset", "name": "local/facts"}]
    ).id
    loud = f"! webhook: {id} is suspended"
    assert loud not in pipeline("status")
    hub.request("POST", f"/api/settings/webhooks/{id}/test")
    wait_until(lambda: loud in pipeline("status"))
    assert any(f"{id} is suspended" in message for message, _ in wrong())


def test_doctor_names_a_watch_that_never_fires(hub: RunningHub) -> None:
    hub.create_dataset("local/facts")
    watched = [{"type": "dataset", "name": "local/fatcs"}]
    id = hub.api.create_webhook(url="http://127.0.0.1:9/", watched=watched).id
    told = f"{id}: there is no dataset:local/fatcs here"
    assert told in [message for message, _ in wrong()]
    hub.create_dataset("local/fatcs")
    assert told not in [message for message, _ in wrong()]


def test_settings_that_changed_are_loud_and_comments_are_none(hub: RunningHub) -> None:
    hub.create_dataset("local/facts")
    file = Path(os.environ["PIPELINE_SETTINGS"])
    file.write_text("# a comment\n" + PIPELINE)
    assert "has changed" not in pipeline("status")
    file.write_text(PIPELINE + "keep = 9\n")
    home = Home.find()
    record = read_stack(home)
    assert record is not None
    part = record.model_copy(update={"only": "hub,receiver"})
    home.stack_file.write_text(part.model_dump_json())
    assert f"! settings: {file} has changed since the stack was started" in pipeline("status")
    (advice,) = [next_step for message, next_step in wrong() if "has changed" in message]
    assert advice == "pipeline down && pipeline up --detach --only hub,receiver"


def test_another_shell_finds_the_stack_that_runs_not_the_ports_of_the_file(
    hub: RunningHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.create_dataset("local/facts")
    home, me = Home.find(), identify(os.getpid())
    assert me is not None
    pipeline_dir = home.releases_dir / "facts"
    release_store.set_current(pipeline_dir, echo_release(pipeline_dir, 1).id)
    [receiver_port] = free_ports(1)
    with running(echo_app(pipeline_dir)) as server_url:
        children = (
            Child(name="hub", process=me, url=hub.url),
            Child(name="serve", process=me, url=server_url, pipeline="facts"),
            Child(name="runner", process=me),
            Child(name="receiver", process=me, url=f"http://127.0.0.1:{receiver_port}"),
        )
        record = StackRecord(process=me, started_at=0.0, is_ready=True, children=children)
        home.stack_file.write_text(record.model_dump_json())
        # The file names no port, and nothing listens on the default ones.
        for name in ("HUB", "SERVING"):
            monkeypatch.delenv(f"PIPELINE_{name}__PORT")
        id = hub.api.create_webhook(
            url="http://127.0.0.1:9/mine", watched=[{"type": "dataset", "name": "local/facts"}]
        ).id

        assert f"export HF_ENDPOINT={hub.url}\n" in pipeline("env")
        assert id in pipeline("webhooks", "ls")
        served = json.loads(pipeline("status", "--json"))["pipelines"][0]["served"]
        assert served["is_live"] and served["url"] == server_url
        assert f"no webhook at {hub.url} reports pushes to local/facts" in dict(wrong())
        assert CliRunner().invoke(app, ["doctor"]).exit_code == 1
        elsewhere = PIPELINE.replace('"local/facts"', '"https://localhost:9/facts.git"')
        Path(os.environ["PIPELINE_SETTINGS"]).write_text(elsewhere)
        assert not any("no webhook at" in message for message in dict(wrong()))


def test_the_newest_commit_is_named_if_another_one_is_served(
    hub: RunningHub, tmp_path: Path
) -> None:
    head = push(hub, clone(hub, tmp_path))
    folder = Home.find().releases_dir / "facts"
    release_store.set_current(folder, echo_release(folder, 1).id)
    assert f"; the newest commit is {head[:12]}\n" in pipeline("status")


def test_a_paused_pipeline_says_so_wherever_its_job_is_shown(
    hub: RunningHub, tmp_path: Path
) -> None:
    head = push(hub, clone(hub, tmp_path))
    assert pipeline("pause") == "facts is paused; to go on: pipeline resume facts\n"
    assert "was paused already" in pipeline("pause", "facts")
    with open_job_store(load_settings(), Home.find()) as store:
        store.submit(training_on(head))
        assert store.claim("me", 60) is None
    [shown] = json.loads(pipeline("status", "--json"))["pipelines"]
    assert shown["paused_since"] > 0
    for command in (["status"], ["jobs", "ls"], ["jobs", "inspect", "--latest"]):
        assert "facts is paused; to go on: pipeline resume facts" in pipeline(*command), command
    assert pipeline("resume") == "facts goes on\n"
    assert pipeline("resume") == "facts was not paused\n"
    with open_job_store(load_settings(), Home.find()) as store:
        assert store.claim("me", 60) is not None


def test_a_lost_object_is_named_and_comes_back_from_a_clone(
    hub: RunningHub, tmp_path: Path
) -> None:
    worktree = clone(hub, tmp_path)
    push_file(hub, worktree, "a.jsonl", '{"prompt": "a", "completion": "b"}\n')
    sha = hub.git("rev-parse", "HEAD:a.jsonl", cwd=worktree).strip()
    [lost] = (tmp_path / "hub").rglob(f"objects/{sha[:2]}/{sha[2:]}")
    lost.unlink()
    answer = hub.request("GET", "/api/datasets/local/facts/tree/main")
    assert answer.status_code == 500
    assert f"is damaged: the object {sha} is missing" in answer.json()["error"]

    docs = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
    [command] = re.findall(r"`(git -C CLONE pack-objects .*)`", docs)
    repository = str(lost.parents[2])
    command = command.replace("CLONE", str(worktree)).replace(".pipeline/hub/…", repository)
    subprocess.run(["sh", "-c", command], check=True)
    assert hub.request("GET", "/api/datasets/local/facts/tree/main").is_success


def test_a_revision_that_is_not_there_is_told_from_a_dataset_that_is_empty(
    hub: RunningHub,
) -> None:
    hub.create_dataset("local/facts")
    home, settings = Home.find(), load_settings()

    def refused(revision: str | None) -> str:
        with open_job_store(settings, home) as store, pytest.raises(NoHead) as error:
            facts = settings.pipeline(None)
            submit_retraining(
                store, home, settings, hub_url=hub.url, pipeline=facts, revision=revision
            )
        return str(error.value)

    told = f"of local/facts could not be fetched from {hub.url}: it has no such revision; push it"
    assert f"deadbeef {told}" in refused("deadbeef")
    assert f"refs/heads/main {told}" in refused(None)


def test_a_job_by_hand_trains_with_the_settings_of_its_command(
    hub: RunningHub, tmp_path: Path
) -> None:
    push(hub, clone(hub, tmp_path))

    def submitted(*options: str) -> JobSpec:
        told = json.loads(pipeline("jobs", "run", "--detach", "--json", *options))
        with open_job_store(load_settings(), Home.find()) as store:
            job = store.cancel(told["job"])
        assert job.by_hand and job.spec.revisions is not None
        assert job.spec.revisions.new_sha is None, "the head, when it starts"
        return job.spec

    plain = submitted().settings
    assert plain["skip_if"] == "nothing_changed"
    assert plain["train"]["mode"] == "auto"
    changed = submitted("--mode", "full").settings
    assert changed["skip_if"] == "never", "it trains even if no row has changed"
    assert changed["train"]["mode"] == "full"
    unchanged = {"train": plain["train"], "skip_if": plain["skip_if"]}
    assert changed | unchanged == plain, "nothing else differs"
    forced = submitted("--force", "--reason", "because")
    assert forced.settings["force_reason"] == "because"


@pytest.mark.parametrize("branch", ["rows/of-may", "rows#2", "rows%41"])
def test_the_newest_commit_of_a_branch_of_any_name(
    hub: RunningHub, tmp_path: Path, branch: str
) -> None:
    head = push(hub, clone(hub, tmp_path), branch)
    Path(os.environ["PIPELINE_SETTINGS"]).write_text(PIPELINE + f'ref = "{branch}"\n')
    [facts] = json.loads(pipeline("status", "--json"))["pipelines"]
    assert facts["dataset_head"] == head


def test_the_servers_that_follow_a_pipeline_are_listed(hub: RunningHub) -> None:
    hub.api.create_repo("local/facts")
    report = {"name": "elsewhere:8000", "release": "r000007-1f3ac9d2", "error": "the disk is full"}
    assert hub.request("POST", "/api/models/local/facts/followers", json=report).is_success
    [facts] = json.loads(pipeline("status", "--json"))["pipelines"]
    [follower] = facts["followers"]
    assert follower.items() >= report.items() and 0 <= follower["age_seconds"] < 60
    assert re.search(
        r"follower +elsewhere:8000 serves r000007-1f3ac9d2, as it said \d+ s ago; the disk is full",
        pipeline("status"),
    )
