"""`docs/architecture.md` names files that exist, and its diagrams have the states of the code. No
file of the server is long."""

import ast
import re
from pathlib import Path
from typing import get_args

from huggingface_hub import HfApi

from jobs import errors as jobs_errors
from jobs.job import ENDED_STATES, OPEN_STATES, JobState
from pipeline.hub.webhooks import DeliveryStatus
from receiver.webhooks import WebhookStatus
from serving import errors
from serving.swap_schemas import SwapPhase, SwapResult
from tests.doors import DOORS, ROOT

TEXT = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
OUTSIDE = "[*]"
MAX_LINES = 500
"""Of a file of `serving/`, so that each can be read at once."""


def diagrams() -> list[set[tuple[str, str]]]:
    """The transitions of each state diagram."""
    blocks = re.findall(r"```mermaid\n(.*?)```", TEXT, re.DOTALL)
    return [set(re.findall(r"^ +(\S+) --> (\w+)", block, re.MULTILINE)) for block in blocks]


def states(transitions: set[tuple[str, str]]) -> set[str]:
    return {state for transition in transitions for state in transition} - {OUTSIDE}


def test_every_file_exists() -> None:
    named = re.findall(r"`([\w./]+\.(?:py|toml))`", TEXT)
    assert len(named) > 60
    assert [name for name in named if not Path(ROOT, name).is_file()] == []


def test_no_file_of_the_server_is_long() -> None:
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines())
        for path in (ROOT / "serving").rglob("*.py")
    }
    assert len(lengths) > 30
    assert {name: length for name, length in lengths.items() if length > MAX_LINES} == {}


def test_the_diagrams_have_the_states_of_the_code() -> None:
    delivery, webhook, job, swap = diagrams()
    results = get_args(SwapResult.model_fields["result"].annotation)
    assert states(delivery) == set(get_args(DeliveryStatus))
    assert states(webhook) == set(get_args(WebhookStatus))
    assert states(job) == set(get_args(JobState))
    assert states(swap) == {*get_args(SwapPhase), *results}


def test_the_diagram_of_a_job_ends_in_the_states_of_jobs_that_have_ended() -> None:
    _, _, job, _ = diagrams()
    assert {state for state, _ in job} == {OUTSIDE, *OPEN_STATES}
    assert states(job) == {*OPEN_STATES, *ENDED_STATES}


def test_every_count_of_the_doors_is_written_down() -> None:
    rows = re.findall(r"^\| ([^|(]+?) (?:\([^)]*\) )?\| [\w, ]+ \| (\d+) \|$", TEXT, re.MULTILINE)
    assert [what for what, _ in rows] == list(DOORS)


def test_every_fault_that_is_survived_names_its_test() -> None:
    text = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    section = text.split("## What it survives\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")][1:]
    named = [re.findall(r"`(tests/[\w/]+\.py)::(\w+)`(?:, | \|$)", line) for line in lines]
    assert len(named) > 25
    for line, tests in zip(lines, named, strict=True):
        assert tests, line
        for file, test in tests:
            assert f"def {test}(" in (ROOT / file).read_text(encoding="utf-8"), line


def test_every_call_of_the_hub_names_a_test_that_makes_it() -> None:
    section = (ROOT / "docs" / "hub.md").read_text(encoding="utf-8").split("### Calls\n")[1]
    rows = re.findall(r"^\|(.*)\|(.*)\|$", section.split("\n### ")[0], re.MULTILINE)[2:]
    assert len(rows) > 25
    for calls, tests in rows:
        named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", tests)
        assert named, calls
        made = "".join(source_of(ROOT / "tests" / "contract" / file, test) for file, test in named)
        for call in re.findall(r"`(\w+)`", calls):
            assert not hasattr(HfApi, call) or call in made, f"{tests} do not call {call}"


def source_of(file: Path, test: str) -> str:
    text = file.read_text(encoding="utf-8")
    (found,) = (
        node
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef) and node.name == test
    )
    return ast.get_source_segment(text, found) or ""


def test_jobs_and_serving_agree_on_temporary_errors() -> None:
    """They never import each other, so each has its own list."""
    assert errors._TEMPORARY_ERRNOS == jobs_errors._TEMPORARY_ERRNOS
