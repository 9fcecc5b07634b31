"""Every row of the benchmarks at its smallest size, and the driver that runs them. Times are not
looked at: a loaded machine has any."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.bench.__main__ import TABLES
from tests.bench.machine import this_machine
from tests.bench.report import Report, Row, markdown
from tests.bench.result import Result, at_least, at_most, reported

ROOT = Path(__file__).parents[2]
NEEDS = {
    "training": "trl",
    "receiver": "gradio",
    "real": "vllm",
    "vllm-swap": "vllm",
}
NEVER = {"failed requests", "answers that mix two releases"}
LONGEST_SECONDS = 840
"""A row takes up to a minute on idle cores, and shares them with other tests."""
ROWS = [
    pytest.param(
        *(table, program.name),
        marks=[pytest.mark.vllm] if NEEDS.get(program.name) == "vllm" else [],
        id=program.name,
    )
    for table, programs in TABLES.items()
    for program in programs
]


def run(out: Path, table: str, *options: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "tests.bench", table, "--small", "--out", str(out), *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LONGEST_SECONDS,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.timeout(LONGEST_SECONDS + 60)
@pytest.mark.parametrize(("table", "name"), ROWS)
def test_a_row_runs_and_says_what_it_must(table: str, name: str, tmp_path: Path) -> None:
    if (needed := NEEDS.get(name)) is not None and find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed")
    done = run(tmp_path, table, "--rows", name)
    assert done.returncode == 0, f"{done.stderr}\n{(tmp_path / f'{table}.json').read_text()}"
    report = Report.model_validate_json((tmp_path / f"{table}.json").read_bytes())
    assert report.is_small
    (row,) = report.rows
    assert row.name == name
    assert row.error is None
    assert row.result is not None
    judged = [figure for figure in row.result.figures if figure.target is not None]
    assert judged
    assert all(figure.met is not None for figure in judged)
    assert all(figure.met is None for figure in row.result.figures if figure.target is None)
    assert any(figure.value is not None for figure in row.result.figures)
    assert row.result.bounded_by
    # No load makes an answer wrong.
    counts = {figure.what: figure.value for figure in judged if figure.what in NEVER}
    assert counts == dict.fromkeys(counts, 0)
    assert (tmp_path / f"{table}.md").read_text() == markdown(report)


def test_a_row_that_fails_is_recorded_and_the_others_are_kept(tmp_path: Path) -> None:
    kept = Row(
        name="publish",
        what="publish a release",
        code="0123456789ab",
        started_at="2026-01-01T00:00:00+00:00",
        load_at_start=(0.0, 0.0, 0.0),
        seconds=1.0,
        result=Result(figures=(reported("publish", 1.0, "MiB/s"),)),
        error=None,
    )
    before = Report(machine=this_machine(), is_small=True, rows=(kept,))
    (tmp_path / "loop.json").write_text(before.model_dump_json())

    done = run(tmp_path, "loop", "--rows", "first-line", "--limit-seconds", "0.05")

    assert done.returncode == 1
    assert "failed: first-line" in done.stderr
    report = json.loads((tmp_path / "loop.json").read_bytes())
    assert [row["name"] for row in report["rows"]] == ["first-line", "publish"]
    assert report["rows"][1] == json.loads(kept.model_dump_json())
    assert report["rows"][0]["result"] is None
    assert "no end in 0.05 s" in report["rows"][0]["error"]
    assert "| failed | no end in 0.05 s |" in (tmp_path / "loop.md").read_text()


def test_a_figure_is_judged_against_its_target() -> None:
    assert at_least("speed", 0.7, 0.7, "x").met
    assert not at_least("speed", 0.69, 0.7, "x").met
    assert at_most("time", 0.3, 0.3, "s").met
    assert not at_most("time", 0.31, 0.3, "s").met
    missing = at_most("time", float("nan"), 0.3, "s")
    assert (missing.value, missing.met) == (None, False)
