"""The README's commands, run as they stand there, in one shell."""

import itertools
import re
import sys
from pathlib import Path

import pytest

from tests.stack_fixtures import Workplace, workplace

__all__ = ["workplace"]

README = Path(__file__).parents[2] / "README.md"
BLOCKS = re.findall(r"^```bash\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)


MAKE, *YOUR_OWN = BLOCKS


def make(workplace: Workplace, target: str, **env: str) -> str:
    """`make TARGET` in the virtual environment that runs this test, which has what it installs."""
    installed = Path(sys.prefix)
    command = ["make", f"--old-file={installed}/.installed", f"VENV={installed}", target]
    return workplace.call(command, timeout=800, cwd=README.parent, env={**workplace.env, **env})


def test_the_first_block_names_these_targets() -> None:
    assert re.findall(r"^make ([\w-]+)", MAKE, re.MULTILINE) == ["demo", "test", "test-all"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_make_demo(workplace: Workplace) -> None:
    shown = make(workplace, "demo")
    assert re.search(r"\b0 failed", shown)
    assert (shown.count("✓"), shown.count("✗")) == (16, 0)
    assert "learned 365 of 365" in shown and "learned 122 of 122" in shown
    assert "Everything is stopped" in shown


def test_make_test_all_runs_each_test_once(workplace: Workplace) -> None:
    shown = make(workplace, "test-all", MAKEFLAGS="--dry-run")
    selections = re.findall(r"-m pytest .*?-m (\w+\b|\".*?\")", shown)
    assert len(selections) == 4
    marks = ("slow", "soak", "real", "vllm", "clients")
    for of_a_test in itertools.product((True, False), repeat=len(marks)):
        has = dict(zip(marks, of_a_test, strict=True))
        if not (has["vllm"] and has["clients"]):
            assert sum(eval(each.strip('"'), has) for each in selections) == 1, has


@pytest.mark.slow
def test_five_minutes_on_data_of_your_own(workplace: Workplace) -> None:
    # `source .venv/bin/activate` finds the commands of the interpreter that runs this test.
    commands = workplace.folder / ".venv" / "bin"
    commands.mkdir(parents=True)
    (commands / "activate").write_text(f'PATH="{commands}:$PATH"\n')
    for name, command in (
        ("pipeline", f'"{sys.executable}" -m pipeline'),
        ("python", f'"{sys.executable}"'),
        ("hf", f'"{Path(sys.executable).parent}/hf"'),
    ):
        (commands / name).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        (commands / name).chmod(0o755)

    identity = {
        f"GIT_{who}_{what}": value
        for who in ("AUTHOR", "COMMITTER")
        for what, value in (("NAME", "reader"), ("EMAIL", "reader@example.invalid"))
    }
    env = {**workplace.env, **identity, "HF_HOME": str(workplace.folder / "hf")}
    # The README's reader has none of these set; `init` and `up` work in the current folder.
    del env["PIPELINE_HOME"], env["PIPELINE_SETTINGS"]
    port = workplace.env["PIPELINE_SERVING__PORT"]
    script = "\n".join(["set -euo pipefail", *YOUR_OWN]).replace(":8000", f":{port}")
    try:
        done = workplace.call(["bash", "-c", script], env=env, timeout=280)
    finally:
        home = workplace.folder / "notes-model"
        if (home / ".pipeline" / "stack.json").exists():
            workplace.call([sys.executable, "-m", "pipeline", "down"], cwd=home, env=env)
    # git sent 200 rows, `hf upload` and `push_to_hub` sent 20 new rows each. The uploads may share
    # a job with each other and with the push.
    ended = r"^(j0\S+) .* (r0\S+) +learned \d+ of (\d+)"
    told = {job: found for job, *found in re.findall(ended, done, re.MULTILINE)}
    assert sum(int(num_rows) for _, num_rows in told.values()) == 240, done
    newest, _ = told[max(told)]
    assert re.search(rf"^x-model-release: {newest}", done, re.MULTILINE | re.IGNORECASE)
    assert re.search(r'"text": ?" box 9\."', done), done
    assert "stopped receiver" in done
