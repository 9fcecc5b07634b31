"""Prints a table as text. Each column is as wide as its widest cell, so that no id is shortened."""

from collections.abc import Sequence


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]], *, empty: str) -> None:
    """Print the rows, or `empty` if there are none. Line breaks in a cell become spaces."""
    if not rows:
        print(empty)
        return
    lines = [list(headings), *([" ".join(cell.split()) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(map(str.ljust, line, widths)).rstrip())
