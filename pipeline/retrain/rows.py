"""`Row`: one thing to learn, known by the hash of its content; and what sets of rows differ in.

No file, no tokenizer, no torch.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

Message = tuple[str, str]
"""(role, content)"""


@dataclass(frozen=True, kw_only=True)
class Row:
    """Exactly one of `text`, `prompt` with `completion`, and `messages` is set."""

    text: str | None = None
    prompt: str | None = None
    completion: str | None = None
    messages: tuple[Message, ...] | None = None
    file: str
    """Where it stands, for messages to people and for telling an edit from a deletion; the same
    content in another file is the same row."""
    number: int
    """Its place among the file's rows, from 0."""

    @cached_property
    def digest(self) -> str:
        """sha256 of the content, in hex: equal for equal rows, wherever they stand."""
        content = [self.text, self.prompt, self.completion, self.messages]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    @property
    def question(self) -> str | None:
        """What the row answers, so that another answer to it is an edit; None for plain text."""
        if self.prompt is not None:
            return self.prompt
        if self.messages is not None:
            return json.dumps(self.messages[:-1])
        return None


def data_digest(rows: Iterable[Row]) -> str:
    """sha256 over the rows as a multiset: order and files do not count, repetitions do."""
    whole = hashlib.sha256()
    for digest in sorted(row.digest for row in rows):
        whole.update(digest.encode())
    return whole.hexdigest()


def split(rows: Sequence[Row], ratio: float, min_held_out: int) -> tuple[list[Row], list[Row]]:
    """Rows to train on and rows held out, by content alone, each in the order given.

    A row is held out when its hash falls in the first `ratio` of all hashes, so that it stays held
    out however the dataset grows; where these are fewer than `min_held_out`, or than a quarter of
    a dataset that is smaller still, the next lowest hashes join them. Of fewer than four rows none
    is held out.
    """
    bound = int(ratio * 2**32)
    ranked = sorted({row.digest for row in rows})
    by_hash = sum(int(digest[:8], 16) < bound for digest in ranked)
    held_out = set(ranked[: max(by_hash, min(min_held_out, len(ranked) // 4))])
    if len(held_out) == len(ranked):
        held_out.clear()
    return (
        [row for row in rows if row.digest not in held_out],
        [row for row in rows if row.digest in held_out],
    )


@dataclass(frozen=True, kw_only=True)
class Difference:
    """What separates two revisions of a dataset."""

    added: tuple[Row, ...]
    """New rows, and the new side of edited ones."""
    num_edited: int
    num_deleted: int


def difference(old: Sequence[Row], new: Sequence[Row]) -> Difference:
    """Compare as multisets; linear in the number of rows.

    A row that is gone counts as edited when a new row answers the same question, or, for plain
    text, when a new row follows the same surviving row in the same file; else as deleted.
    """
    added_left = Counter(row.digest for row in new)
    added_left.subtract(row.digest for row in old)
    removed_left = Counter({digest: -count for digest, count in added_left.items() if count < 0})
    added_left = +added_left
    added = _take(new, added_left)
    removed = _take(old, removed_left)
    old_places, new_places = _places(old, removed), _places(new, added)
    open_edits = Counter(row.question or new_places[row.file, row.number] for row in added)
    num_edited = 0
    for row in removed:
        place = row.question or old_places[row.file, row.number]
        if open_edits[place] > 0:
            open_edits[place] -= 1
            num_edited += 1
    return Difference(
        added=tuple(added), num_edited=num_edited, num_deleted=len(removed) - num_edited
    )


def _take(rows: Sequence[Row], counts: Counter[str]) -> list[Row]:
    """Of each digest as many rows as `counts` has, the last ones: additions are mostly appended."""
    left = Counter(counts)
    taken = []
    for row in reversed(rows):
        if left[row.digest] > 0:
            left[row.digest] -= 1
            taken.append(row)
    return taken[::-1]


def _places(
    rows: Sequence[Row], changed: Sequence[Row]
) -> dict[tuple[str, int], tuple[str, str | None]]:
    """For each row by (file, number): its file and the unchanged row that it follows there."""
    moved = {(row.file, row.number) for row in changed}
    anchor: dict[str, str] = {}
    places: dict[tuple[str, int], tuple[str, str | None]] = {}
    for row in rows:
        places[row.file, row.number] = (row.file, anchor.get(row.file))
        if (row.file, row.number) not in moved:
            anchor[row.file] = row.digest
    return places
