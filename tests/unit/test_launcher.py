"""What launchers give to the command lines of engines, and what they read from their answers. A
program of the test is called in place of the engine's."""

import json
import os
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from jobs import launcher
from jobs.attempt import GIVE_UP_SECONDS, record_result
from jobs.engines import Engines
from jobs.errors import LaunchError
from jobs.job import Job
from jobs.launcher import Launcher, LauncherSettings
from jobs.outcome import JobOutcome
from jobs.process import identify, name_of
from jobs.settings import JobsSettings
from jobs.spec import JobSpec, Resources
from jobs.store import JobStore
from tests.jobs_fixtures import Clock, claim, clock, until

__all__ = ["clock"]

DOCS = Path(__file__).parents[2] / "docs"
NAME = "hotpush-j000012-1"
TICKET = "ticket-of-this-attempt"
ENVIRONMENT = {"JOB_URL": "http://hub:8070/api/jobs/j000012", "JOB_TICKET": TICKET}
ALL = Resources(
    cpus=2, memory="16G", gpus=1, nodes=2, image="me/image", queue="fast", timeout_seconds=90
)
AGENT = "python3 -m jobs.agent"

# Keeps its arguments, its environment and the files that the arguments name. It answers as told.
ENGINE = f"""#!{sys.executable}
import json, os, re, sys
from pathlib import Path
here = Path(__file__).parent
arguments = sys.argv[1:]
a_file = re.compile(r"/\\S+/(?:script|manifest|runtime_env)$")
paths = [path for word in arguments for path in a_file.findall(word)]
call = {{
    "arguments": arguments,
    "ticket": os.environ.get("JOB_TICKET"),
    "files": {{path: [os.stat(path).st_mode & 0o777, Path(path).read_text()] for path in paths}},
}}
with (here / "calls").open("a") as calls:
    calls.write(json.dumps(call) + "\\n")
answers = json.loads((here / "answers").read_text())
code, text = answers[min(len((here / "calls").read_text().splitlines()), len(answers)) - 1]
print(text, file=sys.stderr if code else sys.stdout)
sys.exit(code)
"""


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> "Engine":
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return Engine(tmp_path)


class Engine:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def answers(self, *answers: tuple[int, str], preset: str = "slurm", **keys: Any) -> Launcher:
        """A launcher whose engine gives these answers, the last one again and again."""
        settings = LauncherSettings.model_validate({"preset": preset, **keys})
        for command in (settings.submit, settings.status, settings.cancel):
            if command[0] != "sh":
                (self._folder / command[0]).write_text(ENGINE)
                (self._folder / command[0]).chmod(0o700)
        (self._folder / "answers").write_text(json.dumps(answers))
        (self._folder / "calls").unlink(missing_ok=True)
        return Launcher(settings)

    def calls(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self._folder / "calls").read_text().splitlines()]


def submitted(engine: Engine, preset: str, resources: Resources) -> tuple[str, dict[str, Any]]:
    """The words after the engine's program, and the files that they name: name → mode and text."""
    absent = (1, "exited or failed: no such container, No such container, does not exist")
    answer = absent if preset in ("podman", "docker", "ray") else (0, "")
    engine.answers(answer, (0, ""), preset=preset).submit(NAME, ENVIRONMENT, resources)
    _, call = engine.calls()
    words = " ".join(call["arguments"])
    assert TICKET not in words and call["ticket"] == TICKET
    assert not any(map(os.path.exists, call["files"])), "the files are removed"
    for path in call["files"]:
        words = words.replace(path, Path(path).name)
    return words, {Path(path).name: file for path, file in call["files"].items()}


@pytest.mark.parametrize(
    ("preset", "without", "words"),
    [
        (
            "ray",
            {"image", "queue", "timeout_seconds"},
            f"job submit --no-wait --submission-id={NAME} --runtime-env=runtime_env "
            f"--entrypoint-num-cpus=2 --entrypoint-num-gpus=1 --entrypoint-memory={16 << 30} "
            f"-- {AGENT}",
        ),
        (
            "huggingface",
            {"cpus", "memory", "gpus", "nodes"},
            f"jobs run --detach --name={NAME} --env=JOB_URL --secrets=JOB_TICKET --flavor=fast "
            f"--timeout=90s me/image {AGENT}",
        ),
        (
            "slurm",
            {"image"},
            f"--parsable --job-name={NAME} --no-requeue --export=PATH,JOB_URL,JOB_TICKET "
            f"--output=/tmp/{NAME}.log --nodes=2 --cpus-per-task=2 --mem=16G --gpus-per-node=1 "
            "--partition=fast --time=2 script",
        ),
        (
            "docker",
            {"nodes", "queue", "timeout_seconds"},
            f"run --detach --name={NAME} --pull=never --entrypoint= --network=host "
            "--shm-size=1g --env=JOB_URL "
            f"--env=JOB_TICKET --cpus=2 --memory=16G --gpus=1 me/image {AGENT}",
        ),
        ("kubernetes", {"nodes", "queue"}, "create --filename=manifest"),
    ],
)
def test_a_submission_has_what_the_engine_should_give(
    engine: Engine, preset: str, without: set[str], words: str
) -> None:
    resources = ALL.model_copy(update=dict.fromkeys(without))
    called, files = submitted(engine, preset, resources)
    assert called == words
    for name, (mode, text) in files.items():
        assert mode == (0o700 if name == "script" else 0o600)
        assert (TICKET in text) == (name != "script")


def test_a_resource_that_is_not_set_is_the_engines_to_choose(engine: Engine) -> None:
    called, files = submitted(engine, "slurm", Resources())
    assert called.endswith(f"JOB_TICKET --output=/tmp/{NAME}.log script")
    assert files["script"][1] == "#!/bin/sh\nexec python3 -m jobs.agent\n"


@pytest.mark.parametrize(
    ("resources", "limits"),
    [
        (Resources(image="me/image"), {}),
        (
            ALL.model_copy(update={"nodes": None, "queue": None}),
            {"cpu": "2", "memory": "16Gi", "nvidia.com/gpu": "1"},
        ),
    ],
)
def test_the_manifest_is_a_job_of_kubernetes(
    engine: Engine, resources: Resources, limits: dict[str, str]
) -> None:
    _, files = submitted(engine, "kubernetes", resources)
    manifest = json.loads(files["manifest"][1])
    kubernetes_validate.validate(manifest, "1.35", strict=True)
    (container,) = manifest["spec"]["template"]["spec"]["containers"]
    assert (container["image"], container["command"]) == ("me/image", AGENT.split())
    assert {each["name"]: each["value"] for each in container["env"]} == ENVIRONMENT
    assert container["resources"]["limits"] == limits
    assert manifest["spec"].get("activeDeadlineSeconds") == resources.timeout_seconds
    container["images"] = ["me/image"]
    with pytest.raises(kubernetes_validate.ValidationError, match="images"):
        kubernetes_validate.validate(manifest, "1.35", strict=True)


def test_the_deployment_of_the_docs_is_one_of_kubernetes() -> None:
    manifests = [*yaml.safe_load_all((DOCS / "followers.yaml").read_text())]
    assert [each["kind"] for each in manifests] == ["Deployment", "Service"]
    for each in manifests:
        kubernetes_validate.validate(each, "1.35", strict=True)


def test_the_launcher_of_the_docs(engine: Engine) -> None:
    docs = (DOCS / "cluster.md").read_text(encoding="utf-8")
    (written,) = re.findall(r"^\[launchers\.lsf\]\n.*?(?=^```)", docs, re.M | re.S)
    keys = tomllib.loads(written)["launchers"]["lsf"]
    absent = (1, f"Job <{NAME}> is not found")
    lsf = engine.answers(absent, (0, "Job <7> is submitted"), **keys, options=["-W", "60"])
    lsf.submit(NAME, ENVIRONMENT, Resources(cpus=2))
    assert engine.calls()[1]["arguments"] == f"-J {NAME} -n 2 -W 60 {AGENT}".split()
    assert engine.answers((0, "PEND"), **keys).status(NAME).state == "queued"
    with pytest.raises(LaunchError, match="it needs cpus"):
        lsf.submit(NAME, ENVIRONMENT, Resources())


@pytest.mark.parametrize(
    ("preset", "told", "state"),
    [
        ("kubernetes", "Job Pod Pending PodScheduled Unschedulable", "queued"),
        ("kubernetes", "Job Pod Pending ContainersNotReady ImagePullBackOff", "image_not_found"),
        ("kubernetes", "Job Failed BackoffLimitExceeded Pod Failed OOMKilled", "out_of_memory"),
        ("kubernetes", "Job Failed Pod Failed DisruptionTarget PreemptionByScheduler", "preempted"),
        ("slurm", "OUT_OF_MEMORY OutOfMemory", "out_of_memory"),
        ("ray", "\x1b[31mJob 'x' failed\x1b[39m last logs: : RUNNING", "ended"),
        ("huggingface", "job_id name status\n1 x COMPLETED", "ended"),
        ("podman", "exited OOM (exit code 137)", "out_of_memory"),
        ("slurm", "", "unknown"),
    ],
)
def test_the_words_of_an_engine(engine: Engine, preset: str, told: str, state: str) -> None:
    status = engine.answers((0, told), preset=preset).status(NAME)
    assert status.state == state and not {"\n", "\x1b"} & set(status.told)


def test_nothing_is_submitted_while_the_engine_cannot_be_asked(engine: Engine) -> None:
    slurm = engine.answers((1, "slurm_load_jobs error: Unable to contact slurm controller"))
    for call in (slurm.status, lambda name: slurm.submit(name, ENVIRONMENT, Resources())):
        with pytest.raises(LaunchError, match=r"ask for .* with `squeue .*Unable to contact"):
            call(NAME)
    with pytest.raises(LaunchError, match=r"cancel .* with `scancel"):
        slurm.cancel(NAME)


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_an_attempt_is_given_up_when_its_engine_could_not_be_asked_for_long(
    engine: Engine,
    tmp_path: Path,
    clock: Clock,
    caplog: pytest.LogCaptureFixture,
    is_cancelled: bool,
) -> None:
    words, settings = "Unable to contact slurm controller", JobsSettings()
    launchers = {"slurm": engine.answers((1, words))}
    me = identify(os.getpid())
    assert me is not None
    owner = f"{name_of(me)}/ab.1"
    with JobStore.open(tmp_path / "jobs.db", clock=clock) as store:

        def record(job: Job, outcome: JobOutcome) -> None:
            record_result(store, job, outcome, settings)

        engines = Engines(store, settings, launchers, hub_url="", secret_key=None, record=record)
        store.submit(JobSpec(command=("true",), launcher="slurm"))
        job = store.started(claim(store, owner, 60).id, owner, "elsewhere:1@there 2 boot+3")
        if is_cancelled:
            store.cancel(job.id)
        clock.now += 59 + GIVE_UP_SECONDS
        until(lambda: engines.end_if_gone(job) or "asking again" in caplog.text)
        assert store.get(job.id).owner == owner
        clock.now += 1
        until(lambda: engines.end_if_gone(job) or store.get(job.id).owner is None)
        engines.close()
        ended = store.get(job.id)
    told = ended.outcome if is_cancelled else ended.last_failure
    assert ended.state == ("CANCELED" if is_cancelled else "RUNNING")
    assert told is not None and words in str(told.reason)


def test_a_submission_that_failed_is_asked_for(engine: Engine) -> None:
    absent, refused = (0, ""), (1, "Invalid account")
    with pytest.raises(LaunchError, match=r"submit .* with `sbatch .*Invalid account"):
        engine.answers(absent, refused, absent).submit(NAME, ENVIRONMENT, Resources())
    engine.answers(absent, refused, (0, "PENDING None")).submit(NAME, ENVIRONMENT, Resources())


def test_a_command_that_hangs_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "LIMIT_SECONDS", 0.2)
    # The `sleep` that it leaves holds its output open.
    status = ["sh", "-c", "sleep 3 & echo RUNNING; wait"]
    slurm = LauncherSettings.model_validate({"preset": "slurm", "status": status})
    with pytest.raises(LaunchError, match=r"it took longer than 0\.2 seconds"):
        Launcher(slurm).status(NAME)
