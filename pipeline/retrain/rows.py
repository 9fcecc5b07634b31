"""`Row`: one thing to learn, known by the hash of its content; and what sets of rows differ in.

No file, no tokenizer, no torch.
"""

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

Message = Mapping[str, Any]
"""What a chat template takes: `role`, `content`, and more where there is more (`tool_calls`)."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """Exactly one of `text`, `prompt` with `completion`, and `messages` is set."""

    text: str | None = None
    prompt: str | None = None
    completion: str | None = None
    messages: tuple[Message, ...] | None = field(default=None, hash=False)
    tools: tuple[Mapping[str, Any], ...] | None = field(default=None, hash=False)
    """The functions that the assistant of `messages` may call, as JSON schemas."""
    file: str
    """Where it stands, for messages to people and for telling an edit from a deletion; the same
    content in another file is the same row."""
    number: int
    """Its place among the file's rows, from 0."""
    line: int | None = field(default=None, compare=False)
    """The line that it begins on, where the file has lines."""

    @cached_property
    def digest(self) -> str:
        """sha256 of the content, in hex: equal for equal rows, wherever they stand."""
        return hashlib.sha256(self._content().encode()).hexdigest()

    @property
    def is_counted(self) -> bool:
        """Whether the row has an answer, so that it can be told whether the model says it."""
        return self.text is None

    @property
    def place(self) -> str:
        """Where it stands, in words."""
        if self.line is not None:
            return f"{self.file}, line {self.line}"
        return f"{self.file}, row {self.number + 1}"

    @property
    def question(self) -> str | None:
        """What the row answers, so that another answer to it is an edit; None for plain text."""
        if self.prompt is not None:
            return self.prompt
        if self.messages is not None:
            asked = [_plain(message) for message in self.messages[:-1]]
            return _json([asked, self.tools] if self.tools else asked)
        return None

    @property
    def answer(self) -> str | None:
        """What the row says to its question; None for plain text."""
        if self.messages is not None:
            last = _plain(self.messages[-1])
            return last[1] if isinstance(last, list) else _json(last)
        return self.completion

    def _content(self) -> str:
        messages = None
        if self.messages is not None:
            messages = [_plain(message) for message in self.messages]
        content = [self.text, self.prompt, self.completion, messages]
        return _json([*content, self.tools] if self.tools else content)


def _plain(message: Message) -> Any:
    """The usual message as a pair, so that its hash is that of the rows of earlier releases."""
    if message.keys() == {"role", "content"} and isinstance(message["content"], str):
        return [message["role"], message["content"]]
    return dict(message)


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def data_digest(rows: Iterable[Row]) -> str:
    """sha256 over the rows as a multiset: order and files do not count, repetitions do."""
    whole = hashlib.sha256()
    for digest in sorted(row.digest for row in rows):
        whole.update(digest.encode())
    return whole.hexdigest()


def split(rows: Sequence[Row], ratio: float) -> tuple[list[Row], list[Row]]:
    """Rows to train on and rows held out, by content alone, each in the order given: held out is a
    row whose hash falls in the first `ratio` of all hashes, however the dataset grows."""
    bound = int(ratio * 2**32)
    held_out = {row.digest for row in rows if int(row.digest[:8], 16) < bound}
    return (
        [row for row in rows if row.digest not in held_out],
        [row for row in rows if row.digest in held_out],
    )


@dataclass(frozen=True, kw_only=True)
class Difference:
    """What separates two revisions of a dataset."""

    added: tuple[Row, ...]
    """New rows, and the new side of edited ones."""
    edited: tuple[tuple[Row, Row], ...]
    """Old side and new side."""
    deleted: tuple[Row, ...]
    """Rows that are gone, and that no new row stands for."""

    @property
    def num_permuted(self) -> int:
        """Edited rows that took over the answer of another edited row: a shuffled column."""
        answers = [(old.answer, new.answer) for old, new in self.edited if old.text is None]
        before = Counter(old for old, new in answers if old != new)
        return (before & Counter(new for old, new in answers if old != new)).total()


def difference(old: Sequence[Row], new: Sequence[Row]) -> Difference:
    """Compare as multisets; linear in the number of rows.

    A row that is gone counts as edited when a new row answers the same question, or, for plain
    text, when a new row follows the same surviving row in the same file; else as deleted.
    """
    added_left = Counter(row.digest for row in new)
    added_left.subtract(row.digest for row in old)
    removed_left = Counter({digest: -count for digest, count in added_left.items() if count < 0})
    added = _take(new, +added_left)
    removed = _take(old, removed_left)
    old_places, new_places = _places(old, removed), _places(new, added)
    waiting: defaultdict[Hashable, list[Row]] = defaultdict(list)
    for row in reversed(added):
        waiting[row.question or new_places[row.file, row.number]].append(row)
    edited, deleted = [], []
    for row in removed:
        successors = waiting[row.question or old_places[row.file, row.number]]
        if successors:
            edited.append((row, successors.pop()))
        else:
            deleted.append(row)
    return Difference(added=tuple(added), edited=tuple(edited), deleted=tuple(deleted))


def contradictions(rows: Sequence[Row]) -> tuple[tuple[int, ...], ...]:
    """Indices of rows that answer one question differently, a tuple for each such question."""
    by_question: defaultdict[str, list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        if row.question is not None:
            by_question[row.question].append(index)
    return tuple(
        tuple(indices)
        for indices in by_question.values()
        if len({rows[index].answer for index in indices}) > 1
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
