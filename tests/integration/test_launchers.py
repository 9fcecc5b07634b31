"""Launchers on real engines: a Slurm of this machine, and podman."""

import os
import shutil
import signal
import socket
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from jobs.launcher import Launcher, LauncherSettings
from jobs.spec import Resources
from tests.jobs_fixtures import until
from tests.ports import free_ports

pytestmark = pytest.mark.slow

TICKET = "ticket-that-nobody-else-sees"
ENVIRONMENT = {"JOB_URL": "http://127.0.0.1:1/jobs/j000001", "JOB_TICKET": TICKET}

# Stands in for the agent: each start leaves a file with what it got, and it ends when it is told.
AGENT = """
echo "$JOB_URL $JOB_TICKET $SECRET_OF_THE_RUNNER" > "$1/started.$$"
until [ -e "$1/end" ]; do sleep 0.05; done
exit 3
"""

SLURM = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
AuthInfo=socket={folder}/munge.socket
SlurmUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SchedulerType=sched/builtin
SelectType=select/cons_tres
JobAcctGatherType=jobacct_gather/none
KillWait=1
NodeName={host} NodeAddr=127.0.0.1 CPUs=1 RealMemory=100
PartitionName=all Nodes=ALL Default=YES State=UP
"""

# Both are for machines of which a part of the cgroups or of the limits cannot be changed.
PODMAN = """
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]
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

    def starts(self) -> list[str]:
        return [file.read_text().strip() for file in self.folder.glob("started.*")]


def output(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True, timeout=30).stdout


@pytest.fixture(params=["slurm", "podman"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Engine:
    (tmp_path / "agent.sh").write_text(AGENT)
    launcher, resources, shown = request.getfixturevalue(request.param)(tmp_path)
    return Engine(launcher, resources, tmp_path, shown)


Made = Callable[[Path], tuple[Launcher, Resources, Callable[[str], str]]]


def launcher_of(preset: str, folder: Path, *options: str) -> Launcher:
    agent = ("sh", f"{folder}/agent.sh", str(folder))
    return Launcher(
        LauncherSettings.model_validate({"preset": preset, "options": options, "agent": agent})
    )


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    programs = ["munged", "slurmctld", "slurmd", "sbatch"]
    path = f"{os.environ['PATH']}:/usr/sbin"
    if os.getuid() != 0 or not all(shutil.which(program, path=path) for program in programs):
        pytest.skip(f"needs root and {', '.join(programs)}")
    folder = tmp_path_factory.mktemp("slurm")
    folder.chmod(0o700)
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o400)
    (folder / "state").mkdir()
    (folder / "slurm.conf").write_text(
        SLURM.format(host=socket.gethostname(), ports=free_ports(2), folder=folder)
    )
    files = {"key-file": "munge.key", "socket": "munge.socket", "log-file": "munged.log"}
    files |= {"pid-file": "munged.pid", "seed-file": "munged.seed"}
    munged = ["munged", "--foreground", "--force", "--num-threads=1"]
    munged += [f"--{option}={folder}/{file}" for option, file in files.items()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", path)
        patch.setenv("SLURM_CONF", f"{folder}/slurm.conf")
        patch.setenv("SECRET_OF_THE_RUNNER", "secret")
        none = subprocess.DEVNULL
        daemons = [
            subprocess.Popen(command, start_new_session=True, stdout=none, stderr=none)
            for command in (munged, ["slurmctld", "-D"], ["slurmd", "-D"])
        ]
        try:
            until(lambda: "idle" in subprocess.getoutput("timeout 5 sinfo -h -o %T"), 60)

            def shown(name: str) -> str:
                number = output("squeue", "--noheader", f"--name={name}", "--format=%i").strip()
                script = output("scontrol", "write", "batch_script", number, "-")
                assert "agent.sh" in script
                return output("scontrol", "show", "job", "--oneliner", number) + script

            yield lambda agent: (launcher_of("slurm", agent), Resources(cpus=1), shown)
        finally:
            for daemon in reversed(daemons):
                daemon.send_signal(signal.SIGTERM)
                daemon.wait(30)


@pytest.fixture(scope="module")
def podman(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    if shutil.which("podman") is None or shutil.which("runc") is None:
        pytest.skip("needs podman and runc")
    folder = tmp_path_factory.mktemp("podman")
    (folder / "containers.conf").write_text(PODMAN)
    (folder / "storage.conf").write_text(
        f'[storage]\ndriver = "vfs"\nrunroot = "{folder}/run"\ngraphroot = "{folder}/graph"\n'
    )
    # An image without files: the container sees the programs of this machine.
    with tarfile.open(folder / "image.tar", "w") as tar:
        for name in ("bin", "lib", "lib64"):
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, f"usr/{name}"
            tar.addfile(link)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CONTAINERS_CONF", f"{folder}/containers.conf")
        patch.setenv("CONTAINERS_STORAGE_CONF", f"{folder}/storage.conf")
        patch.setenv("SECRET_OF_THE_RUNNER", "secret")
        output("podman", "import", f"{folder}/image.tar", "local/empty:1")
        resources = Resources(image="local/empty:1", memory="100M")

        def shown(name: str) -> str:
            # Podman shows the environment of a container to the user who started it.
            return output(
                "podman", "container", "inspect", "--format={{.Args}} {{.Config.Cmd}}", name
            )

        yield lambda agent: (
            launcher_of("podman", agent, "--volume=/usr:/usr:ro", f"--volume={agent}:{agent}"),
            resources,
            shown,
        )
        output("podman", "rm", "--all", "--force", "--time=1")


def test_a_job_is_started_once_and_its_ticket_is_seen_by_nobody(engine: Engine) -> None:
    name, launcher = "hotpush-j000001-1", engine.launcher
    assert launcher.status(name).state == "unknown"
    engine.submit(name)
    assert launcher.status(name).state in ("queued", "running")
    engine.submit(name)
    until(lambda: len(engine.starts()) == 1, 60)
    assert launcher.status(name).state == "running"
    assert engine.starts() == [" ".join(ENVIRONMENT.values())], "and no other variable"
    commands = [file.read_bytes() for file in Path("/proc").glob("[0-9]*/cmdline")]
    assert any(str(engine.folder).encode() in command for command in commands)
    assert not any(TICKET.encode() in command for command in commands)
    assert TICKET not in engine.shown(name)
    (engine.folder / "end").touch()
    until(lambda: launcher.status(name).state == "ended", 60)
    engine.submit(name)
    assert launcher.status(name).state == "ended" and len(engine.starts()) == 1
    launcher.cancel(name)


def test_a_job_is_cancelled(engine: Engine) -> None:
    name, launcher = "hotpush-j000002-1", engine.launcher
    launcher.cancel(name)
    engine.submit(name)
    until(lambda: launcher.status(name).state == "running", 60)
    launcher.cancel(name)
    until(lambda: launcher.status(name).state in ("ended", "unknown"), 60)
    launcher.cancel(name)
