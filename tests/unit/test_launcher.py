"""What launchers give to the command lines of engines, and what they read from their answers. A
program of the test is called in place of the engine's."""

import json
import os
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from jobs import launcher
from jobs.errors import LaunchError
from jobs.launcher import Launcher, LauncherSettings
from jobs.spec import Resources

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
            {"nodes", "image", "queue", "timeout_seconds"},
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


def test_the_manifest_of_kubernetes(engine: Engine) -> None:
    _, files = submitted(
        engine, "kubernetes", ALL.model_copy(update={"nodes": None, "queue": None})
    )
    manifest = json.loads(files["manifest"][1])
    assert (manifest["apiVersion"], manifest["kind"]) == ("batch/v1", "Job")
    spec, labels = manifest["spec"], {"hotpush-job": NAME}
    assert manifest["metadata"] == {"name": NAME, "labels": labels}
    assert (spec["backoffLimit"], spec["activeDeadlineSeconds"]) == (0, 90)
    assert spec["template"]["metadata"] == {"labels": labels}
    pod = spec["template"]["spec"]
    assert pod["restartPolicy"] == "Never"
    assert pod["containers"] == [
        {
            "name": "job",
            "image": "me/image",
            "command": AGENT.split(),
            "env": [{"name": name, "value": value} for name, value in ENVIRONMENT.items()],
            "resources": {"limits": {"cpu": "2", "memory": "16Gi", "nvidia.com/gpu": "1"}},
        }
    ]


def test_the_launcher_of_the_docs(engine: Engine) -> None:
    docs = (Path(__file__).parents[2] / "docs" / "cluster.md").read_text(encoding="utf-8")
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
