"""Real engines of this machine: a Slurm, podman, and a node of Ray."""

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.jobs_fixtures import until
from tests.ports import free_ports
from tests.stack_fixtures import Workplace

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

ROOT = Path(__file__).parents[1]
RESOURCES = {"slurm": "{ cpus = 1 }", "podman": f'{{ image = "{IMAGE}" }}', "ray": "{ cpus = 1 }"}
RAY = ROOT / ".venv-ray" / "bin"
SECOND_RAY_NODE = "127.0.0.3"
KillNode = Callable[[], None]
"""Kills the daemon that has started the jobs of a node, and starts it again."""


def launcher(engine: str) -> str:
    """The settings of a launcher there, whose agent runs this code. In a container, the agent is
    another user in another root."""
    options = {
        "slurm": ["--requeue", "--export=PATH,PYTHONPATH,JOB_URL,JOB_TICKET"],
        "podman": [
            *(f"--volume={folder}:{folder}:ro" for folder in _folders()),
            *("--user=65534", "--tmpfs=/tmp", "--env=HOME=/tmp", "--memory=800M"),
            *(f"--env=PYTHONPATH={ROOT}", "--env=PATH=/usr/bin"),
        ],
        "ray": [],
    }
    python = f"{RAY}/python" if engine == "ray" else sys.executable
    agent = [python, "-m", "jobs.agent"]
    return (
        f"[launchers.{engine}]\nagent = {json.dumps(agent)}\n"
        f"options = {json.dumps(options[engine])}\n"
    )


def run_jobs_on(engine: str, workplace: Workplace, resources: str | None = None) -> None:
    """Let the jobs of the workplace's pipeline run there."""
    settings = workplace.folder / "pipeline.toml"
    where = f'launcher = "{engine}"\nresources = {resources or RESOURCES[engine]}\n'
    text = settings.read_text().replace("debounce_seconds", f"{where}debounce_seconds")
    settings.write_text(launcher(engine) + text)


def _folders() -> list[str]:
    """What a container must see of this machine, so that it can run this code."""
    return list(dict.fromkeys(("/usr", "/etc", str(ROOT), sys.prefix, sys.base_prefix)))


def output(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True, timeout=30).stdout


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KillNode]:
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
        nodes = [["slurmd", "-D", "-N", node] for node in ("one", "two")]
        daemons = [_daemon(command) for command in (munged, ["slurmctld", "-D"], *nodes)]

        def kill_nodes() -> None:
            for number, node in enumerate(nodes, start=2):
                daemons[number].kill()
                daemons[number].wait()
                daemons[number] = _daemon(node)

        try:
            until(lambda: "2 idle" in subprocess.getoutput("timeout 5 sinfo -h -o '%D %T'"), 60)
            yield kill_nodes
        finally:
            for daemon in reversed(daemons):
                daemon.send_signal(signal.SIGTERM)
                daemon.wait(30)


def _daemon(command: list[str]) -> subprocess.Popen[bytes]:
    none = subprocess.DEVNULL
    return subprocess.Popen(command, start_new_session=True, stdout=none, stderr=none)


@pytest.fixture(scope="module")
def podman(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KillNode]:
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

        def kill_monitors() -> None:
            form = "{{.State.ConmonPid}}"
            names = output("podman", "ps", "--quiet").split()
            for pid in output("podman", "inspect", f"--format={form}", *names).split():
                os.kill(int(pid), signal.SIGKILL)

        yield kill_monitors
        output("podman", "rm", "--all", "--force", "--time=1")


@pytest.fixture(scope="module")
def ray() -> Iterator[KillNode]:
    """A node of Ray, for `ray job` in this process and its children."""
    if not (RAY / "ray").exists():
        pytest.skip("needs Ray: make install")
    with contextlib.ExitStack() as stack:
        # The names of its sockets have room for a short path only.
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ray-"))
        port, dashboard, agent, client = free_ports(4)
        # For 127.0.0.1, Ray would take the address of this machine.
        command = [*_ray_node(folder, "127.0.0.2"), "--head", "--num-cpus=4", f"--port={port}"]
        command += [f"--dashboard-port={dashboard}", f"--dashboard-agent-listen-port={agent}"]
        command += [f"--ray-client-server-port={client}"]
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("PATH", f"{RAY}:{os.environ['PATH']}")
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_AUTH_MODE", "token")  # Ray listens to all addresses
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        patch.setenv("RAY_HEAD", f"127.0.0.2:{port}")
        patch.setenv("RAY_ADDRESS", f"http://127.0.0.1:{dashboard}")
        head = [_daemon(command)]

        def await_head() -> None:
            asked = "timeout 20 ray job list >/dev/null 2>&1"
            until(lambda: subprocess.run(asked, shell=True).returncode == 0, 90, every_seconds=0.5)

        def kill_node() -> None:
            children = Path(f"/proc/{head[0].pid}/task/{head[0].pid}/children").read_text()
            for pid in map(int, children.split()):
                if "raylet" in Path(f"/proc/{pid}/cmdline").read_text():
                    os.kill(pid, signal.SIGKILL)
            head[0].wait(60)  # it ends the other daemons of the node
            head[0] = _daemon(command)
            await_head()

        try:
            await_head()
            yield kill_node
        finally:
            head[0].terminate()
            head[0].wait(60)


@contextlib.contextmanager
def second_ray_node() -> Iterator[None]:
    """Another node beside that of `ray`. Jobs start on the first one."""
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:
        command = [*_ray_node(folder, SECOND_RAY_NODE), f"--address={os.environ['RAY_HEAD']}"]
        node = _daemon([*command, "--num-cpus=2", "--dashboard-agent-listen-port=0"])
        try:
            yield
        finally:
            node.terminate()
            node.wait(60)


def _ray_node(folder: str, address: str) -> list[str]:
    (metrics,) = free_ports(1)
    command = [f"{RAY}/ray", "start", "--block", f"--temp-dir={folder}"]
    command += [f"--node-ip-address={address}", f"--metrics-export-port={metrics}"]
    return [*command, "--min-worker-port=0", "--max-worker-port=0"]  # any free ones
