"""What several `pipeline` commands share: their options, and how they print a table."""

from collections.abc import Sequence
from typing import Annotated, Any

import typer

PipelineOption = Annotated[
    str | None, typer.Option("--pipeline", help="The pipeline, if several are configured.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Print only ids.")]
HostOption = Annotated[
    str | None, typer.Option(help="The address to listen on. Overrides `host` in the settings.")
]
PortOption = Annotated[
    int | None, typer.Option(help="The port to listen on. Overrides `port` in the settings.")
]


def without_none(**options: Any) -> dict[str, Any]:
    """The options that were given."""
    return {name: value for name, value in options.items() if value is not None}


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]], *, empty: str) -> None:
    """Print the rows, or `empty` if there are none. Line breaks in a cell become spaces. Each
    column is as wide as its widest cell, so that no id is shortened."""
    if not rows:
        print(empty)
        return
    lines = [list(headings), *([" ".join(cell.split()) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(map(str.ljust, line, widths)).rstrip())
