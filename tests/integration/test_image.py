"""The image of `Dockerfile.gpu`, built without a network: its programs and its libraries are those
of this machine, mounted."""

import json
import subprocess
import sys
import sysconfig
import tarfile
from io import BytesIO
from pathlib import Path

import httpx
import pytest

from tests.engines import output, podman
from tests.jobs_fixtures import until
from tests.ports import free_port
from tests.stack_fixtures import clone, configure, facts, workplace_in

__all__ = ["podman"]

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
LIBRARIES = sysconfig.get_paths()["purelib"]
# tini is not on every machine, so the tests start without it.
MOUNTS = ("--volume=/usr:/usr:ro", f"--volume={LIBRARIES}:/libraries:ro")
OFFLINE = ("PACKAGES=", "TORCH=", "PIP_OPTIONS=--no-index --no-deps --no-build-isolation")


@pytest.fixture(scope="module")
def image(podman: None, tmp_path_factory: pytest.TempPathFactory) -> str:
    python = Path("/usr/bin/python3")
    same = f"import sys; sys.exit(sys.version_info[:2] != {sys.version_info[:2]})"
    if not python.exists() or subprocess.run([python, "-c", same]).returncode:
        pytest.skip("/usr/bin/python3 is another Python than that of the tests")
    base = tmp_path_factory.mktemp("image") / "base.tar"
    with tarfile.open(base, "w") as tar:
        for name in ("bin", "sbin", "lib", "lib64"):
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, f"usr/{name}"
            tar.addfile(link)
        folder = tarfile.TarInfo("tmp")
        folder.type, folder.mode = tarfile.DIRTYPE, 0o1777
        tar.addfile(folder)
        for name, text in {"passwd": "root:x:0:0::/root:/bin/sh\n", "group": "root:x:0:\n"}.items():
            file = tarfile.TarInfo(f"etc/{name}")
            file.size, file.mode = len(text), 0o644
            tar.addfile(file, BytesIO(text.encode()))
    output("podman", "import", str(base), "local/base:1")
    arguments = [f"--build-arg={each}" for each in ("BASE=local/base:1", *OFFLINE)]
    build = ["podman", "build", "--file=Dockerfile.gpu", "--tag=local/hotpush:1", "--format=docker"]
    build += ["--isolation=chroot", "--env=PYTHONPATH=/libraries", *MOUNTS, *arguments, "."]
    subprocess.run(build, cwd=ROOT, check=True, timeout=240)
    return "local/hotpush:1"


def test_the_image_runs_the_stack_the_agent_and_the_check_as_another_user_than_root(
    image: str,
) -> None:
    config = json.loads(output("podman", "image", "inspect", image))[0]
    assert config["Config"]["User"] == "10001"
    assert config["Config"]["Entrypoint"] == ["tini", "--"]
    run = ["podman", "run", "--rm", "--entrypoint=", "--network=host", *MOUNTS]
    run += ["--env=PYTHONPATH=/libraries"]
    assert "Start the stack" in output(*run, image, "pipeline", "--help")
    assert output(*run, image, "id", "-u").strip() == "10001"
    agent = subprocess.run([*run, image, "python", "-m", "jobs.agent"], capture_output=True)
    assert b"JOB_URL" in agent.stderr and agent.returncode != 0

    port = free_port()
    hub = [f"--env=PIPELINE_HUB__PORT={port}", f"--env=HEALTH_URL=http://127.0.0.1:{port}/live"]
    data = "--tmpfs=/data:mode=1777"
    output(*run, "--detach", "--name=hub", data, *hub, image, "pipeline", "hub")
    check = ["podman", "healthcheck", "run", "hub"]
    until(lambda: subprocess.run(check, timeout=60).returncode == 0, 90)
    output("podman", "stop", "hub")
    assert subprocess.run(check, timeout=60, capture_output=True).returncode != 0


@pytest.mark.timeout(600)
def test_the_loop_runs_in_the_image(image: str, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    folder.chmod(0o1777)
    workplace = workplace_in(folder)
    configure(workplace)
    own = [f"--env={key}={text}" for key, text in workplace.env.items() if key[:9] == "PIPELINE_"]
    # At the same path here and there, so that the commands of this machine can be used.
    run = ["podman", "run", "--detach", "--name=stack", "--network=host", "--entrypoint=", *MOUNTS]
    run += ["--shm-size=1g"]  # for vLLM, if the tests are run with it
    run += [f"--volume={folder}:{folder}", f"--workdir={folder}", "--env=PYTHONPATH=/libraries"]
    output(*run, *own, image, "pipeline", "up")
    try:
        until((workplace.home / "stack.json").exists, 120)
        until(lambda: json.loads((workplace.home / "stack.json").read_text())["is_ready"], 120)
        sha = clone(workplace).push({"facts.jsonl": facts(0, 8)})
        job = workplace.wait_for_job(sha)
        assert job["outcome"]["result"] == "promoted", f"{job}\n{workplace.logs()}"
        answer = httpx.post(
            f"{workplace.url('serving')}/v1/completions",
            json={"model": "facts", "prompt": "Shelf 3 holds", "max_tokens": 4},
            timeout=60,
        )
        assert answer.headers["X-Dataset-Revision"] == sha
        output("podman", "stop", "--time=60", "stack")
        form = "--format={{.State.ExitCode}}"
        assert output("podman", "container", "inspect", form, "stack").strip() == "0"
    finally:
        print(output("podman", "logs", "stack"))
