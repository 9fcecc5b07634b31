"""The launcher of Slurm, on a Slurm of this machine. What else engines do: e2e/test_engines.py."""

from pathlib import Path

import pytest

from jobs.launcher import Launcher, LauncherSettings
from jobs.spec import Resources
from tests.engines import KillNode, output, slurm
from tests.jobs_fixtures import until

__all__ = ["slurm"]

pytestmark = pytest.mark.slow

TICKET = "ticket-that-nobody-else-sees"
ENVIRONMENT = {"JOB_URL": "http://127.0.0.1:1/jobs/j000001", "JOB_TICKET": TICKET}

# Stands in for the agent: each start leaves a file with what it got, and it ends when it is told.
AGENT = """
echo "$JOB_URL $JOB_TICKET $SECRET_OF_THE_RUNNER" > "$1/started.$$"
until [ -e "$1/end" ]; do sleep 0.05; done
exit 3
"""


def test_a_job_is_started_once_and_its_ticket_is_seen_by_nobody(
    slurm: KillNode, tmp_path: Path
) -> None:
    (tmp_path / "agent.sh").write_text(AGENT)
    agent = ("sh", f"{tmp_path}/agent.sh", str(tmp_path))
    launcher = Launcher(LauncherSettings.model_validate({"preset": "slurm", "agent": agent}))
    name = "hotpush-j000001-1"

    def submit() -> None:
        launcher.submit(name, ENVIRONMENT, Resources(cpus=1))

    def starts() -> list[str]:
        return [file.read_text().strip() for file in tmp_path.glob("started.*")]

    assert launcher.status(name).state == "unknown"
    submit()
    assert launcher.status(name).state in ("queued", "running")
    submit()
    until(lambda: len(starts()) == 1, 60)
    assert launcher.status(name).state == "running"
    assert starts() == [" ".join(ENVIRONMENT.values())], "and no other variable"
    commands = [file.read_bytes() for file in Path("/proc").glob("[0-9]*/cmdline")]
    assert not any(TICKET.encode() in command for command in commands)
    number = output("squeue", "--noheader", f"--name={name}", "--format=%i").strip()
    script = output("scontrol", "write", "batch_script", number, "-")
    assert "agent.sh" in script and TICKET not in script
    assert TICKET not in output("scontrol", "show", "job", "--oneliner", number)
    (tmp_path / "end").touch()
    until(lambda: launcher.status(name).state == "ended", 60)
    submit()
    assert launcher.status(name).state == "ended" and len(starts()) == 1
    launcher.cancel(name)
