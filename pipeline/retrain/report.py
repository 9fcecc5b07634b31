"""`DataReport`: what a revision gives to train on, in words for logs and people."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from pydantic import BaseModel, ConfigDict

from pipeline.retrain.data_files import SPLITS, Split
from pipeline.retrain.dataset import Dataset
from pipeline.retrain.rows import Row, contradictions

NUM_SHOWN = 5
"""Of what may be very many."""
_TEXT_SHOWN = 60


class FileRows(BaseModel):
    model_config = ConfigDict(frozen=True)

    file: str
    split: Split
    num_rows: int


class Answer(BaseModel):
    model_config = ConfigDict(frozen=True)

    place: str
    """File and line."""
    answer: str


class Contradiction(BaseModel):
    model_config = ConfigDict(frozen=True)

    question: str
    answers: tuple[Answer, ...]


class DataReport(BaseModel):
    model_config = ConfigDict(frozen=True)

    num_rows: int
    """To train on."""
    num_held_out: int
    num_characters: int
    """Of the rows to train on."""
    num_tokens: int | None = None
    """The same in tokens, where a tokenizer was at hand."""
    max_length: int | None = None
    """The most tokens that a row is learned with, where a tokenizer was at hand."""
    cut: tuple[str, ...] = ()
    """Places of the rows with an answer that are longer, so that a part of each is not learned."""
    files: tuple[FileRows, ...]
    held_out_split: Split
    """The one that is measured; the other is left alone."""
    ignored: dict[str, str]
    """File → why it is not read."""
    bad: tuple[str, ...] = ()
    """Each row that cannot be learned from, with its place: a job fails on the first one."""
    num_contradictions: int
    contradictions: tuple[Contradiction, ...]
    """The first ones."""

    def lines(self) -> Iterator[str]:
        """In words, the sum first."""
        amount = f"{self.num_characters:,} characters"
        if self.num_tokens is not None:
            amount = f"{self.num_tokens:,} tokens"
        yield (
            f"{_rows(self.num_rows)} to train on ({amount}), {self.num_held_out:,} held out to "
            "measure"
        )
        for split in SPLITS:
            files = [each for each in self.files if each.split == split]
            if files:
                rows = _listed(f"{each.file} {_rows(each.num_rows)}" for each in files)
                yield f"  {split}{self._use(split)}: {rows}"
        by_reason = defaultdict(list)
        for file, reason in self.ignored.items():
            by_reason[reason].append(file)
        for reason, names in by_reason.items():
            yield f"  ignored, {reason}: {_listed(names)}"
        if self.num_contradictions:
            yield f"  answered in several ways, {_count(self.num_contradictions, 'question')}:"
        for found in self.contradictions:
            answers = _listed(f"{_short(each.answer)} ({each.place})" for each in found.answers)
            yield f"    {_short(found.question)} → {answers}"
        if self.cut:
            yield (
                f"  longer than {self.max_length:,} tokens (max_length under [pipelines.train]), "
                f"so a part is not learned, {_rows(len(self.cut))}: {_listed(self.cut)}"
            )
        if self.bad:
            yield f"  bad, {_rows(len(self.bad))}:"
        for problem in self.bad:
            yield f"    {problem}"

    def _use(self, split: Split) -> str:
        if split == "train":
            return ""
        return ", held out" if split == self.held_out_split else ", neither trained nor measured"


def report_on(
    dataset: Dataset,
    rows: Sequence[Row],
    held_out: Sequence[Row],
    *,
    bad: Iterable[str] = (),
    num_tokens: int | None = None,
    max_length: int | None = None,
    cut: Sequence[Row] = (),
) -> DataReport:
    """rows, held_out: what is trained on and what is measured of `dataset`. cut: the rows with an
    answer of more than `max_length` tokens in all."""
    found = contradictions(rows)
    return DataReport(
        num_rows=len(rows),
        num_held_out=len(held_out),
        num_characters=sum(map(_num_characters, rows)),
        num_tokens=num_tokens,
        max_length=max_length,
        cut=tuple(row.place for row in cut),
        files=tuple(
            FileRows(file=file, split=split, num_rows=len(dataset.by_file[file]))
            for split in SPLITS
            for file in dataset.files.splits[split]
        ),
        held_out_split=dataset.held_out_split,
        ignored=dict(dataset.files.ignored),
        bad=tuple(bad),
        num_contradictions=len(found),
        contradictions=tuple(
            _contradiction([rows[index] for index in group]) for group in found[:NUM_SHOWN]
        ),
    )


def _contradiction(rows: Sequence[Row]) -> Contradiction:
    first_of_each = {row.answer: row for row in reversed(rows)}
    return Contradiction(
        question=_question(rows[0]),
        answers=tuple(
            Answer(place=row.place, answer=row.answer or "")
            for row in sorted(first_of_each.values(), key=lambda row: (row.file, row.number))
        ),
    )


def _question(row: Row) -> str:
    """For people: of a conversation, what was said last before the answer."""
    if row.messages is None:
        return row.prompt or ""
    return str(row.messages[-2]["content"]) if len(row.messages) > 1 else ""


def _num_characters(row: Row) -> int:
    said = [message["content"] for message in row.messages or ()]
    return sum(len(text) for text in (row.text, row.prompt, row.completion, *said) if text)


def _rows(count: int) -> str:
    return _count(count, "row")


def _count(count: int, thing: str) -> str:
    return f"{count:,} {thing}" if count == 1 else f"{count:,} {thing}s"


def _listed(things: Iterable[str]) -> str:
    things = list(things)
    more = len(things) - NUM_SHOWN
    return ", ".join(things[:NUM_SHOWN]) + (f" and {more:,} more" if more > 0 else "")


def _short(text: str) -> str:
    line = " ".join(text.split())
    return repr(line if len(line) <= _TEXT_SHOWN else line[: _TEXT_SHOWN - 1] + "…")
