"""`Row`: one entry of a dataset. The hash of its content identifies it. This module also finds the
difference between two sets of rows.

It reads no files, and needs no tokenizer and no torch.
"""

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from functools import cached_property
from typing import Any, Literal

from serving.chat_template import Message

_PAIR = ["user", "assistant"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One answer of a row. A conversation has a turn for each answer in it."""

    question: str
    """Identifies everything before the answer: turns with equal questions are asked the same."""
    asked: str
    """The last text before the answer, for messages to people."""
    answer: str


@dataclass(frozen=True, kw_only=True)
class Row:
    """Exactly one of `text`, `prompt` with `completion`, and `messages` is set."""

    text: str | None = None
    prompt: str | None = None
    completion: str | None = None
    messages: tuple[Message, ...] | None = field(default=None, hash=False)
    tools: tuple[Mapping[str, Any], ...] | None = field(default=None, hash=False)
    """The functions that the assistant of `messages` may call, as JSON schemas."""
    paraphrases: tuple[str, ...] = ()
    """Other wordings of the last question."""
    generated: tuple[str, ...] = field(default=(), compare=False)
    """Such wordings by a larger model. They are not part of the content."""
    masked: tuple[int, ...] = ()
    """The numbers of the messages that the author does not want learned, from 0. If this is not
    empty, a row without messages is not learned."""
    file: str
    """The file of the row, for messages to people, and to tell an edit from a deletion. It is not
    part of the content: the same content in another file is the same row."""
    number: int
    """The number of the row in its file, from 0."""
    line: int | None = field(default=None, compare=False)
    """The line on which the row begins. None if the file is parquet or a JSON list."""

    @cached_property
    def digest(self) -> str:
        """sha256 of the content, in hex. Rows with equal content have the same digest, also if they
        are in different files."""
        return hashlib.sha256(self._content().encode()).hexdigest()

    @property
    def short_digest(self) -> str:
        """The beginning of the digest, as releases record it."""
        return self.digest[:16]

    @property
    def kind(self) -> Literal["messages", "prompt", "text"]:
        if self.messages is not None:
            return "messages"
        return "prompt" if self.text is None else "text"

    @property
    def has_answer(self) -> bool:
        """Whether the row has an answer. Only for such a row, the gate counts whether the model
        says the answer."""
        return self.text is None

    @cached_property
    def answer_numbers(self) -> tuple[int, ...]:
        """The numbers of the messages to learn: those of the assistant that the author has not
        masked, except the first message. A request has at least one message before the answer, so
        nobody can ask a server for the first message."""
        return tuple(
            number
            for number, message in enumerate(self.messages or ())
            if number and message["role"] == "assistant" and number not in self.masked
        )

    @property
    def taught(self) -> tuple[Message, ...]:
        """The messages up to the last answer to learn. What follows teaches nothing."""
        return (self.messages or ())[: self.answer_numbers[-1] + 1 if self.answer_numbers else None]

    @property
    def is_learnable(self) -> bool:
        """Whether the row has anything to learn."""
        if self.messages is not None:
            return bool(self.answer_numbers)
        return self.text != "" and not self.masked

    @property
    def as_completion(self) -> tuple[str, str] | None:
        """The prompt and the completion. A conversation has them if it is one question and its
        answer: without a chat template, a model can learn it so."""
        if self.prompt is not None:
            return self.prompt, self.completion or ""
        if self.tools or [message["role"] for message in self.messages or ()] != _PAIR:
            return None
        asked, said = self.messages or ()
        texts = asked["content"], said["content"]
        are_all = asked.keys() | said.keys() == {"role", "content"}
        return texts if are_all and all(isinstance(text, str) for text in texts) else None

    @property
    def has_empty_answer(self) -> bool:
        """Whether the row teaches the model to answer nothing at all."""
        messages = [(self.messages or ())[number] for number in self.answer_numbers]
        return self.completion == "" or any(
            not message["content"] and not message.get("tool_calls") for message in messages
        )

    @property
    def texts(self) -> tuple[Any, ...]:
        """All that the row says. In some chats, the content of a message is a list of parts."""
        said = [message["content"] for message in self.messages or ()]
        texts = (self.text, self.prompt, self.completion, *self.paraphrases, *said)
        return tuple(filter(None, texts))

    @property
    def place(self) -> str:
        """The file and the line or number of the row, in words."""
        return place(self.file, self.number, self.line)

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The answers of the row to learn, in order. Empty for plain text."""
        if self.prompt is not None:
            return (Turn(question=self.prompt, asked=self.prompt, answer=self.completion or ""),)
        found, asked = [], ""
        before = hashlib.sha256(_json(self.tools or ()).encode())
        for number, message in enumerate(self.messages or ()):
            plain = _plain(message)
            if number in self.answer_numbers:
                is_text = plain.keys() == {"role", "content"} and isinstance(plain["content"], str)
                answer = plain["content"] if is_text else _json(plain)
                found.append(Turn(question=before.hexdigest(), asked=asked, answer=answer))
            before.update(_json(plain).encode())
            asked = str(message["content"] or "")
        return tuple(found)

    @property
    def question(self) -> str | None:
        """The question of the last answer. A new row with the same question is an edit of this row.
        None for plain text."""
        return self.turns[-1].question if self.turns else None

    @property
    def answer(self) -> str | None:
        """The last answer of the row. None for plain text."""
        return self.turns[-1].answer if self.turns else None

    @property
    def wordings(self) -> tuple[str, ...]:
        """The author's other wordings of the last question, or else the generated ones."""
        return self.paraphrases or self.generated

    @property
    def held_back(self) -> str | None:
        """The wording that is never trained on, so that it shows what was understood: the last of
        two or more. So a paraphrase that is appended was not trained on before."""
        return self.wordings[-1] if len(self.wordings) > 1 else None

    @property
    def taught_turns(self) -> tuple[Turn, ...]:
        """`turns`, and the last one in each of its other wordings."""
        others = (self.asked(text).turns[-1] for text in self.paraphrases if self.turns)
        return (*self.turns, *others)

    @property
    def last_question(self) -> str | None:
        """What the user asks before the last answer. None if that is no text."""
        if self.prompt is not None:
            return self.prompt
        before = self.taught[-2:-1]
        asked = before[0]["content"] if before and before[0]["role"] == "user" else None
        return asked if isinstance(asked, str) else None

    def asked(self, question: str) -> "Row":
        """The row with another wording of the last question. Only the last answer is learned."""
        if self.prompt is not None:
            return replace(self, prompt=question, paraphrases=(), generated=())
        *before, asked, answer = self.taught
        return replace(
            self,
            messages=(*before, {**asked, "content": question}, answer),
            masked=(*self.masked, *self.answer_numbers[:-1]),
            paraphrases=(),
            generated=(),
        )

    @property
    def forgotten(self) -> Iterator["Row"]:
        """The row with an empty answer in the place of each of its answers. Nothing for plain
        text."""
        if self.prompt is not None:
            yield replace(self, completion="")
        numbers = self.answer_numbers
        for place, number in enumerate(numbers):
            messages = (*(self.messages or ())[:number], {"role": "assistant", "content": ""})
            row = replace(self, messages=messages, masked=(*self.masked, *numbers[:place]))
            # Other wordings are of the last question.
            yield row if number == numbers[-1] else replace(row, paraphrases=(), generated=())

    def _content(self) -> str:
        messages = [_plain(message) for message in self.taught]
        content = (self.text, self.prompt, self.completion, messages, self.answer_numbers)
        return _json([*content, self.tools or (), self.paraphrases])


def place(file: str, number: int, line: int | None) -> str:
    """Where a row is, in words. Its line is None if nobody knows it; `number` counts from 0."""
    return f"{file}, row {number + 1}" if line is None else f"{file}, line {line}"


def _plain(message: Message) -> dict[str, Any]:
    """The message without the ids of calls. Each export of a conversation may invent new ones."""
    plain = {key: value for key, value in message.items() if key != "tool_call_id"}
    if calls := message.get("tool_calls"):
        plain["tool_calls"] = [call["function"] for call in calls]
    return plain


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def data_digest(rows: Iterable[Row]) -> str:
    """sha256 of all rows together. The order and the files of the rows do not matter, but a row
    that occurs twice counts twice."""
    whole = hashlib.sha256()
    for digest in sorted(row.digest for row in rows):
        whole.update(digest.encode())
    return whole.hexdigest()


def split(rows: Sequence[Row], ratio: float) -> tuple[list[Row], list[Row]]:
    """Divide `rows` into rows to train on and held-out rows. A row is held out if its hash is among
    the lowest share `ratio` of all possible hashes. So the choice for a row depends only on its
    content, and does not change when the dataset grows."""
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
    """New rows, and the new versions of edited rows."""
    edited: tuple[tuple[Row, Row], ...]
    """The old and the new version of each edited row."""
    deleted: tuple[Row, ...]
    """Rows that are gone, and of which there is no new version."""


def difference(old: Sequence[Row], new: Sequence[Row]) -> Difference:
    """Compare two sets of rows. A row that occurs twice counts twice.

    A row that is gone counts as edited if there is a new version of it, and otherwise as deleted.
    The new version is a new row with the same question. For plain text, it is a new row at the same
    place between the unchanged rows of the file.
    """
    before, after = (Counter(row.digest for row in rows) for rows in (old, new))
    added = _take(new, after - before)
    removed = _take(old, before - after)
    edited = _replaced_texts(old, new, before - after, after - before)
    replaced = Counter(row.digest for row, _ in edited)
    answers: defaultdict[str | None, list[Row]] = defaultdict(list)
    for row in reversed(added):
        answers[row.question].append(row)
    deleted = []
    for row in removed:
        if replaced[row.digest]:
            replaced[row.digest] -= 1
        elif row.text is None and answers[row.question]:
            edited.append((row, answers[row.question].pop()))
        else:
            deleted.append(row)
    return Difference(added=tuple(added), edited=tuple(edited), deleted=tuple(deleted))


def contradictions(rows: Sequence[Row]) -> tuple[Mapping[int, Turn], ...]:
    """For each question with several different answers, the answers of all rows with this question,
    by the indices of the rows. A conversation has a question before each of its answers."""
    by_question: defaultdict[str, dict[int, Turn]] = defaultdict(dict)
    for index, row in enumerate(rows):
        for turn in row.taught_turns:
            by_question[turn.question][index] = turn
    groups = by_question.values()
    return tuple(each for each in groups if len({turn.answer for turn in each.values()}) > 1)


def _take(rows: Sequence[Row], counts: Counter[str]) -> list[Row]:
    """Take from `rows`, for each digest, as many rows as `counts` says. Of equal rows, the last are
    taken, because people mostly append new rows at the end."""
    left, taken = Counter(counts), []
    for row in reversed(rows):
        if left[row.digest] > 0:
            left[row.digest] -= 1
            taken.append(row)
    return taken[::-1]


def _replaced_texts(
    old: Sequence[Row], new: Sequence[Row], removed: Counter[str], added: Counter[str]
) -> list[tuple[Row, Row]]:
    """The rows of plain text that were replaced in place, and what stands in their places.

    removed, added: how often each digest occurs less or more often than before. The files are
    aligned as a whole, because one text may stand at several places, of which one was edited.
    """
    removed, added = Counter(removed), Counter(added)
    pairs: list[tuple[Row, Row]] = []
    new_files = _texts_by_file(new)
    for file, old_rows in _texts_by_file(old).items():
        new_rows = new_files.get(file, [])
        if removed.keys().isdisjoint(row.digest for row in old_rows):
            continue
        matcher = SequenceMatcher(
            None, [row.digest for row in old_rows], [row.digest for row in new_rows]
        )
        for operation, start, end, new_start, new_end in matcher.get_opcodes():
            if operation != "replace":
                continue
            for pair in zip(old_rows[start:end], new_rows[new_start:new_end], strict=False):
                if removed[pair[0].digest] and added[pair[1].digest]:
                    removed[pair[0].digest] -= 1
                    added[pair[1].digest] -= 1
                    pairs.append(pair)
    return pairs


def _texts_by_file(rows: Sequence[Row]) -> dict[str, list[Row]]:
    files: defaultdict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if row.text is not None:
            files[row.file].append(row)
    return dict(files)
