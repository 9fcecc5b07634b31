"""Finds stop strings in text that arrives in pieces. A stop string may span several pieces."""

from collections.abc import Sequence


class StopStrings:
    """Finds the stop string that is complete first in one text. If several stop strings end at the
    same place, finds the one that comes first in the list. Holds text back only if the text may be
    the beginning of a stop string."""

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        """With `include`, the text ends after the stop string, otherwise before it."""
        self._stops = tuple(stops)
        self._include = include
        self._held = ""

    def add(self, piece: str) -> tuple[str, str | None]:
        """The text that can be passed on now, and the stop string that ends it; None if the text
        goes on."""
        if not self._stops:
            return piece, None
        text = self._held + piece
        found = [(p + len(stop), stop) for stop in self._stops if (p := text.find(stop)) >= 0]
        if found:
            self._held = ""
            end, stop = min(found, key=lambda each: each[0])
            return text[: end if self._include else end - len(stop)], stop
        keep = max(overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def flush(self) -> str:
        """The text that is held back. Call this at the end of the text, if no stop string was
        found."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that is also a beginning of `stop`, but not all of
    `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
