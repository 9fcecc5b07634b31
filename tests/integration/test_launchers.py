"""Launchers on real engines: a Slurm of this machine, and podman."""

import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from jobs.launcher import Launcher, LauncherSettings
from jobs.spec import Resources
from tests.engines import IMAGE, output, podman, slurm
from tests.jobs_fixtures import until

__all__ = ["podman", "slurm"]

pytestmark = pytest.mark.slow

TICKET = "ticket-that-nobody-else-sees"
ENVIRONMENT = {"JOB_URL": "http://127.0.0.1:1/jobs/j000001", "JOB_TICKET": TICKET}

# Stands in for the agent: each start leaves a file with what it got, and it ends when it is told.
AGENT = """
echo "$JOB_URL $JOB_TICKET $SECRET_OF_THE_RUNNER" > "$1/started.$$"
until [ -e "$1/end" ]; do sleep 0.05; done
exit 3
"""


@dataclass
class Engine:
    launcher: Launcher
    resources: Resources
    folder: Path
    """Of the stand-in for the agent."""
    shown: Callable[[str], str]
    """What the engine shows about a job to other users of the machine."""

    def submit(self, name: str) -> None:
        self.launcher.submit(name, ENVIRONMENT, self.resources)

    def processes(self) -> list[str]:
        """The commands of the stand-in that run now."""
        shown = subprocess.run(
            ["ps", "-ww", "-eo", "args"], capture_output=True, text=True, check=True
        )
        return [line for line in shown.stdout.splitlines() if f"{self.folder}/agent.sh" in line]

    def starts(self) -> list[str]:
        return [file.read_text().strip() for file in self.folder.glob("started.*")]


@pytest.fixture(params=["slurm", "podman"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Engine:
    (tmp_path / "agent.sh").write_text(AGENT)
    request.getfixturevalue(request.param)
    if request.param == "slurm":
        return Engine(launcher_of("slurm", tmp_path), Resources(cpus=1), tmp_path, shown_by_slurm)
    mounts = ("--volume=/usr:/usr:ro", f"--volume={tmp_path}:{tmp_path}")
    launcher = launcher_of("podman", tmp_path, *mounts)
    return Engine(launcher, Resources(image=IMAGE, memory="100M"), tmp_path, shown_by_podman)


def shown_by_slurm(name: str) -> str:
    number = output("squeue", "--noheader", f"--name={name}", "--format=%i").strip()
    script = output("scontrol", "write", "batch_script", number, "-")
    assert "agent.sh" in script
    return output("scontrol", "show", "job", "--oneliner", number) + script


def shown_by_podman(name: str) -> str:
    # Podman shows the environment of a container to the user who started it.
    return output("podman", "container", "inspect", "--format={{.Args}} {{.Config.Cmd}}", name)


def launcher_of(preset: str, folder: Path, *options: str) -> Launcher:
    agent = ("sh", f"{folder}/agent.sh", str(folder))
    return Launcher(
        LauncherSettings.model_validate({"preset": preset, "options": options, "agent": agent})
    )


def test_a_job_is_started_once_and_its_ticket_is_seen_by_nobody(engine: Engine) -> None:
    name, launcher = "hotpush-j000001-1", engine.launcher
    assert launcher.status(name).state == "unknown"
    engine.submit(name)
    assert launcher.status(name).state in ("queued", "running")
    engine.submit(name)
    until(lambda: len(engine.starts()) == 1, 60)
    assert launcher.status(name).state == "running"
    assert engine.starts() == [" ".join(ENVIRONMENT.values())], "and no other variable"
    assert engine.processes()
    commands = [file.read_bytes() for file in Path("/proc").glob("[0-9]*/cmdline")]
    assert not any(TICKET.encode() in command for command in commands)
    assert TICKET not in engine.shown(name)
    (engine.folder / "end").touch()
    until(lambda: launcher.status(name).state == "ended", 60)
    engine.submit(name)
    assert launcher.status(name).state == "ended" and len(engine.starts()) == 1
    launcher.cancel(name)
