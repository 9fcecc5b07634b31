"""The wheel holds everything that runs: every package, every migration, every page."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("jobs", "pipeline", "receiver", "serving")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which the wheel was installed, without its dependencies."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    # A copy: building leaves folders behind, which must not be this checkout's.
    files = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    for name in files:
        if name.split("/")[0] in (*PACKAGES, "pyproject.toml", "README.md", "LICENSE"):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    wheels = folder / "wheels"
    subprocess.run(
        [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(wheels), str(source)],
        check=True,
    )
    (wheel,) = wheels.glob("hotpush-*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", str(folder / "site"), str(wheel)])
    return folder / "site"


def test_no_file_of_the_packages_is_left_out(installed: Path) -> None:
    for package in PACKAGES:
        missing = [
            str(file.relative_to(ROOT))
            for file in (ROOT / package).rglob("*")
            if file.is_file()
            and "__pycache__" not in file.parts
            and not (installed / file.relative_to(ROOT)).exists()
        ]
        assert missing == []


def test_the_installed_command_runs(installed: Path, tmp_path: Path) -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(installed)!r})\n"
        "sys.argv = ['pipeline', 'jobs', 'ls']\n"
        "import pipeline; assert pipeline.__file__.startswith(sys.path[0]), pipeline.__file__\n"
        "from pipeline.cli.main import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PIPELINE_HOME": str(tmp_path / ".pipeline")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_only_our_packages_are_at_the_top(installed: Path) -> None:
    top = {path.name for path in installed.iterdir() if path.suffix != ".dist-info"}
    assert top - {"bin"} == set(PACKAGES)
