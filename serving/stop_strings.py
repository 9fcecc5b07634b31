"""Finds stop strings in text that arrives in pieces, however they are cut."""

from collections.abc import Sequence


class StopStrings:
    """Holds back no more than what could still become a stop string."""

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        """With `include`, the text ends with the stop string and not before it."""
        self._stops = tuple(stops)
        self._include = include
        self._held = ""

    def add(self, piece: str) -> tuple[str, str | None]:
        """Text that is safe to give out, and the stop string that ended it."""
        if not self._stops:
            return piece, None
        text = self._held + piece
        found = [(place, stop) for stop in self._stops if (place := text.find(stop)) >= 0]
        if found:
            self._held = ""
            place, stop = min(found, key=lambda each: each[0])
            return text[: place + len(stop) * self._include], stop
        keep = max(overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
