"""What several `pipeline` commands share: the project on which they act, their options, and how
they print a table."""

import os
import re
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from pipeline.errors import PipelineError
from pipeline.paths import Home, settings_file
from pipeline.settings import load_settings, no_settings_file

PipelineOption = Annotated[
    str | None, typer.Option("--pipeline", help="The pipeline, if several are configured.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Print only ids.")]


def without_none(**options: Any) -> dict[str, Any]:
    """The options that were given."""
    return {name: value for name, value in options.items() if value is not None}


def seconds(text: str) -> float:
    """The parser of options that are a length of time."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smhd]?)", text)
    if found is None or not (number := float(found[1])):
        raise typer.BadParameter(f"{text!r} is no length of time; write 90, 30s, 5m, 2h or 7d")
    return number * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}[found[2]]


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]], *, empty: str) -> None:
    """Print the rows, or `empty` if there are none."""
    print("\n".join(table_lines(headings, rows)) or empty)


def table_lines(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table; none if there are no rows. Line breaks in a cell become spaces. Each
    column is as wide as its widest cell, so that no id is shortened."""
    if not rows:
        return []
    lines = [list(headings), *([" ".join(cell.split()) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]


def project_home() -> Home:
    """The state folder. Unlike `Home.find`, this function raises PipelineError if the shell is in
    no project. This is the case if there is neither a settings file nor a state folder, and neither
    `PIPELINE_HOME` nor `PIPELINE_SETTINGS` is set. Without the error, a command would report that
    nothing is up, although a stack may be up in another folder."""
    home = Home.find()
    if not _is_project(home):
        raise no_settings_file()
    return home


def _is_project(home: Home) -> bool:
    is_named = "PIPELINE_HOME" in os.environ or "PIPELINE_SETTINGS" in os.environ
    return is_named or home.root.exists() or settings_file().exists()


class ChangesStack(TyperCommand):
    """A command that changes something. Before it runs, it names the stack on which it acts. So a
    person in the wrong folder sees it."""

    def invoke(self, context: Any) -> Any:
        home, given = Home.find(), context.params
        if _is_project(home) and given.get("endpoint") is None and not given.get("as_json"):
            pipelines = given.get("pipeline") or ", ".join(_names_of_pipelines()) or "none"
            print(f"stack {home.root}, pipeline {pipelines}", file=sys.stderr)
        return super().invoke(context)


def _names_of_pipelines() -> list[str]:
    try:
        return [each.name for each in load_settings().pipelines]
    except PipelineError:
        return []  # the command itself reports this error
