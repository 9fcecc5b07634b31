"""Real engines of this machine: a Slurm, and podman."""

import os
import shutil
import signal
import socket
import subprocess
import tarfile
from collections.abc import Iterator

import pytest

from tests.jobs_fixtures import until
from tests.ports import free_ports

SLURM = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthInfo=socket={folder}/munge.socket
SlurmUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SchedulerType=sched/builtin
SelectType=select/cons_tres
JobAcctGatherType=jobacct_gather/none
KillWait=1
NodeName=DEFAULT CPUs=1 RealMemory=100
NodeName=one,two NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]},{ports[2]}
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


IMAGE = "local/empty:1"
"""An image without files, for podman: its containers see mounted programs of this machine."""


def output(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True, timeout=30).stdout


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cluster of two nodes, for the commands of Slurm in this process and its children."""
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
        SLURM.format(host=socket.gethostname(), ports=free_ports(3), folder=folder)
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
            for command in (
                munged,
                ["slurmctld", "-D"],
                *(["slurmd", "-D", "-N", node] for node in ("one", "two")),
            )
        ]
        try:
            until(lambda: "2 idle" in subprocess.getoutput("timeout 5 sinfo -h -o '%D %T'"), 60)
            yield
        finally:
            for daemon in reversed(daemons):
                daemon.send_signal(signal.SIGTERM)
                daemon.wait(30)


@pytest.fixture(scope="module")
def podman(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A podman with IMAGE, for this process and its children."""
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
        output("podman", "import", f"{folder}/image.tar", IMAGE)
        probe = ["podman", "run", "--rm", "--volume=/usr:/usr:ro", IMAGE, "true"]
        done = subprocess.run(probe, capture_output=True, text=True, timeout=120)
        if done.returncode != 0:
            pytest.skip(f"podman runs no container on this machine: {done.stderr.strip()}")
        yield
        output("podman", "rm", "--all", "--force", "--time=1")
