"""vLLM is chosen where it can compute on a GPU, and torch everywhere else."""

import re
import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from serving.engines import settings
from serving.engines.settings import choose_engine
from serving.settings import ServingSettings


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of its devices; vLLM is installed on it."""
    monkeypatch.setattr(settings, "_DEVICES", tmp_path)
    monkeypatch.setattr(settings, "version", lambda name: "0.32.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path


def test_vllm_computes_on_a_gpu(machine: Path) -> None:
    (machine / "nvidiactl").touch()
    assert choose_engine("auto").name == "torch"
    (machine / "nvidia0").touch()
    assert choose_engine("auto").name == "vllm"
    assert "0.32.0" in choose_engine("auto").reason


@pytest.mark.parametrize("visible", ["", "-1"])
def test_a_hidden_gpu_is_none(machine: Path, monkeypatch: pytest.MonkeyPatch, visible: str) -> None:
    (machine / "nvidia0").touch()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert choose_engine("auto").name == "torch"


def test_without_vllm_it_is_said_what_installs_it(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(settings, "version", missing)
    (machine / "nvidia0").touch()
    choice = choose_engine("auto")
    assert choice.name == "torch" and "pip install -e '.[vllm]'" in choice.reason


def test_who_names_an_engine_gets_it(machine: Path) -> None:
    (machine / "nvidia0").touch()
    assert choose_engine("torch").name == "torch"
    assert ServingSettings().engine == "auto"
    assert ServingSettings().start_seconds == ServingSettings().vllm.start_seconds
    assert ServingSettings(engine="torch").start_seconds == ServingSettings().phase_seconds


def test_what_installs_an_extra_is_a_command_for_a_checkout() -> None:
    root = Path(__file__).parents[2]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    known = project["optional-dependencies"]
    files = [root / "README.md", root / "Dockerfile.gpu", *root.glob("docs/*.md")]
    for package in ("jobs", "pipeline", "receiver", "serving"):
        files += (root / package).rglob("*.py")
    named = set()
    for file in files:
        text = file.read_text()
        assert not re.search(r"install '?hotpush", text), f"{file}: no index has this package"
        for extras in re.findall(r"pip install (?:\S+ )?'(?:\.|/src)\[([\w,]+)\]'", text):
            named |= set(extras.split(","))
    assert {"torch", "vllm", "postgres"} <= named <= set(known)
    assert "'/src[torch,vllm,postgres]'" in (root / "Dockerfile.gpu").read_text()
