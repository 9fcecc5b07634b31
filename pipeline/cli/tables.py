"""Prints a listing: columns as wide as what is in them, so that no id is ever cut."""

from collections.abc import Sequence


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]], *, empty: str) -> None:
    """`empty` is printed where there is no row. A row's line breaks are shown as spaces."""
    if not rows:
        print(empty)
        return
    lines = [list(headings), *([" ".join(cell.split()) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(map(str.ljust, line, widths)).rstrip())
