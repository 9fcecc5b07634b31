"""`DataReport`: the rows of a dataset revision (to train on, held out, bad, contradicting), in
words for logs and people."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from pydantic import BaseModel, ConfigDict

from pipeline.errors import PipelineError
from pipeline.retrain.data_files import Split
from pipeline.retrain.dataset import Dataset
from pipeline.retrain.errors import DataError
from pipeline.retrain.rows import Row, Turn, contradictions

NUM_SHOWN = 5
"""A list in the report names at most this many entries."""
_TEXT_SHOWN = 60


def grouped(errors: Iterable[PipelineError]) -> tuple[str, ...]:
    """What is wrong, once for all rows that have it, in words."""
    places: defaultdict[str, list[str]] = defaultdict(list)
    for error in errors:
        problem, place = str(error), None
        if isinstance(error, DataError):
            problem, place = error.problem, error.place
        places[problem] += filter(None, [place])
    return tuple(
        ": ".join((*(each if len(each) < 2 else [_places(each)]), problem))
        for problem, each in places.items()
    )


class DataReport(BaseModel):
    model_config = ConfigDict(frozen=True)

    num_rows: int
    """Rows to train on."""
    num_held_out: int
    num_characters: int
    """Characters in the rows to train on."""
    num_tokens: int | None = None
    """Tokens in the rows to train on. None if the report was made without a tokenizer."""
    max_length: int | None = None
    """A row is learned with at most this many tokens. None if there was no tokenizer."""
    cut: tuple[str, ...] = ()
    """The places of the rows with an answer that are longer than `max_length`. A part of each of
    these rows is not learned."""
    files: dict[Split, dict[str, int]]
    """Split → file → how many rows it has with anything to learn."""
    held_out_split: Split
    """The held-out split that is measured: validation or test. The other one is not used."""
    ignored: dict[str, str]
    """File → why it is not read."""
    nothing_to_learn: tuple[str, ...] = ()
    """The places of the rows that have nothing to learn. They are neither trained on nor
    counted."""
    empty_answers: tuple[str, ...] = ()
    """The places of the rows to train on whose answer, or one of whose answers, is empty."""
    num_bad: int = 0
    """Rows and files that cannot be used. A job fails at the first one."""
    bad: tuple[str, ...] = ()
    """What is wrong with them."""
    num_contradictions: int
    contradictions: tuple[str, ...]
    """The first NUM_SHOWN questions that have several different answers, with these answers."""

    def lines(self) -> Iterator[str]:
        """The report as lines of text. The first line is the summary."""
        amount = f"{self.num_characters:,} characters"
        if self.num_tokens is not None:
            amount = f"{self.num_tokens:,} tokens"
        yield (
            f"{_rows(self.num_rows)} to train on ({amount}), {self.num_held_out:,} held out to "
            "measure"
        )
        for split, files in self.files.items():
            rows = _listed(f"{file} {_rows(count)}" for file, count in files.items())
            yield f"  {split}{self._use(split)}: {rows}"
        by_reason = defaultdict(list)
        for file, reason in self.ignored.items():
            by_reason[reason].append(file)
        for reason, names in by_reason.items():
            yield f"  ignored, {reason}: {_listed(names)}"
        if self.num_contradictions:
            yield f"  answered in several ways, {_count(self.num_contradictions, 'question')}:"
        yield from (f"    {each}" for each in self.contradictions)
        if self.nothing_to_learn:
            yield f"  nothing to learn, so left out, {_places(self.nothing_to_learn)}"
        if self.empty_answers:
            yield f"  learned with an empty answer, {_places(self.empty_answers)}"
        if self.cut and self.max_length is not None:
            yield f"  {too_long(self.cut, self.max_length)}"
        if self.bad:
            yield f"  bad, {_rows(self.num_bad)}:"
        yield from (f"    {each}" for each in self.bad)

    def _use(self, split: Split) -> str:
        if split == "train":
            return ""
        return ", held out" if split == self.held_out_split else ", neither trained nor measured"


def report_on(
    dataset: Dataset,
    rows: Sequence[Row],
    held_out: Sequence[Row],
    *,
    bad: Iterable[PipelineError] = (),
    elsewhere: Mapping[str, str] = {},
    num_tokens: int | None = None,
    max_length: int | None = None,
    cut: Sequence[Row] = (),
) -> DataReport:
    """Make the report. rows: the rows of `dataset` to train on. held_out: the rows to measure. cut:
    the rows with an answer that are longer than `max_length` tokens. elsewhere: file → why it could
    not be read here."""
    found = contradictions(rows)
    bad = list(bad)
    return DataReport(
        num_rows=len(rows),
        num_held_out=len(held_out),
        num_characters=sum(len(text) for row in rows for text in row.texts),
        num_tokens=num_tokens,
        max_length=max_length,
        cut=tuple(row.place for row in cut),
        nothing_to_learn=tuple(row.place for row in dataset.nothing_to_learn),
        empty_answers=tuple(row.place for row in rows if row.has_empty_answer),
        files={
            split: {file: sum(row.is_learnable for row in dataset.by_file[file]) for file in files}
            for split, files in dataset.files.splits.items()
            if files
        },
        held_out_split=dataset.held_out_split,
        ignored={**dataset.files.ignored, **elsewhere},
        num_bad=len(bad),
        bad=grouped(bad),
        num_contradictions=len(found),
        contradictions=tuple(_contradiction(group, rows) for group in found[:NUM_SHOWN]),
    )


def too_long(places: Sequence[str], max_length: int) -> str:
    """Names the rows at these places, which are longer than `max_length` tokens."""
    return (
        f"longer than {max_length:,} tokens (max_length under [pipelines.train]), so a part is not "
        f"learned, {_places(places)}"
    )


def _contradiction(group: Mapping[int, Turn], rows: Sequence[Row]) -> str:
    """group: the different answers to one question, by the indices of their rows."""
    first_of_each: dict[str, Row] = {}
    for index, turn in group.items():
        first_of_each.setdefault(turn.answer, rows[index])
    answers = sorted(first_of_each.items(), key=lambda each: (each[1].file, each[1].number))
    shown = _listed(f"{_short(answer)} ({row.place})" for answer, row in answers)
    return f"{_short(next(iter(group.values())).asked)} → {shown}"


def _rows(count: int) -> str:
    return _count(count, "row")


def _count(count: int, thing: str) -> str:
    return f"{count:,} {thing}" if count == 1 else f"{count:,} {thing}s"


def _places(places: Sequence[str]) -> str:
    return f"{_rows(len(places))}: {_listed(places)}"


def _listed(things: Iterable[str]) -> str:
    things = list(things)
    more = len(things) - NUM_SHOWN
    return ", ".join(things[:NUM_SHOWN]) + (f" and {more:,} more" if more > 0 else "")


def _short(text: str) -> str:
    line = " ".join(text.split())
    return repr(line if len(line) <= _TEXT_SHOWN else line[: _TEXT_SHOWN - 1] + "…")
