"""Reads the rows of a dataset snapshot, and decides which rows to train on, which to hold out, and
whether to train at all. `report_on` tells people about the rows.

A *full* training trains the base model on all rows. A *delta* trains the weights of the parent (the
release from which the job continues) on the changed rows.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

from pipeline.errors import PipelineError
from pipeline.retrain.base_model import files_digest
from pipeline.retrain.dataset import Dataset, check_not_empty, read_dataset, shortened
from pipeline.retrain.errors import DataError
from pipeline.retrain.job import DatasetSnapshot, Parent
from pipeline.retrain.rows import (
    Difference,
    Row,
    Turn,
    contradictions,
    data_digest,
    difference,
    split,
)
from pipeline.retrain.settings import DataSettings, RetrainSettings
from pipeline.retrain.sources import Revision
from serving.weights.release import Lineage

MIN_TEXTS = 1_000
HELD_OUT_RATIO = 0.032
"""A text corpus of at least MIN_TEXTS rows can spare this share of them. Only the loss on unseen
text shows whether a model generalises, and with 32 rows, a comparison row by row already shows a
change of a few per cent."""
FORGOTTEN_WORDINGS = 8
"""A deleted row is forgotten in at most so many other wordings. The model then forgets it in most
of the rest."""
MAX_UNLEARNED = 100
"""The largest number of deleted rows that a delta unlearns. If more rows were deleted, a full
training without them is cheaper."""
NUM_SHOWN = 5
"""A list in the report names at most this many entries."""
_TEXT_SHOWN = 60

Mode = Literal["full", "delta"]


@dataclass(frozen=True, kw_only=True)
class TrainingData:
    """The rows of a revision, compared with the revision that the parent was trained on. If there
    is no such revision, every row is new."""

    mode: Mode
    reason: str
    """Why this mode was chosen. For the log."""
    digest: str
    """The digest (`rows.data_digest`) of `rows`."""
    rows: tuple[Row, ...]
    """All rows to train on, in the order of the dataset."""
    changed: tuple[Row, ...]
    """The rows of `rows` that were added or edited; in a delta, also those that wait from earlier
    jobs."""
    known: tuple[Row, ...]
    """The other rows of `rows`. A full training trains on all of them. A delta mixes in a sample of
    them."""
    edited: tuple[tuple[Row, Row], ...]
    """The old and the new version of each row that was trained on and is edited. The new version of
    a text may be held out."""
    deleted: tuple[Row, ...]
    """Rows that were trained on and are gone. There is no copy and no new version of them, and no
    conversation with the same beginning and the same answers."""
    held_out: tuple[Row, ...]
    """Rows that are measured and not trained on."""
    held_out_trained: frozenset[str]
    """Digests of held-out rows that the parent was or may have been trained on. It may know them by
    heart. So the gate does not expect new weights to do as well on them."""
    contradicting: frozenset[str]
    """The digests of the rows whose question has several different answers."""
    num_before: int
    """The number of rows to train on in the revision before."""
    num_waiting: int
    """The number of rows to train on that earlier jobs have not learned."""
    missed_before: frozenset[str]
    """Digests of those of them that the job before has tried to learn."""
    dataset: Dataset
    """The revision as it was read."""

    @property
    def num_contradicting(self) -> int:
        """How many of `rows` contradict another row."""
        return sum(row.digest in self.contradicting for row in self.rows)

    @property
    def num_lost(self) -> int:
        """How many rows of the revision before were deleted or edited. Who only adds paraphrases
        loses nothing."""
        edited = sum(old.text is not None or old.turns != new.turns for old, new in self.edited)
        return edited + len(self.deleted)

    @property
    def forgotten(self) -> tuple[Row, ...]:
        """What a delta learns in the place of the deleted rows: an empty answer to their questions,
        and to these in other words if no row has the answer any more. Questions that a row answers
        are left out."""
        if not self.deleted:
            return ()
        questions = {turn.question for row in self.rows for turn in row.taught_turns}
        answers = {row.answer for row in self.rows}
        found: list[Row] = []
        for deleted in self.deleted:
            for row in deleted.forgotten:
                others = row.wordings[:FORGOTTEN_WORDINGS] if deleted.answer not in answers else ()
                found += [row, *map(row.asked, others)]
        return tuple(row for row in found if row.question not in questions)

    @property
    def is_removal(self) -> bool:
        """Whether this training removes rows that are deleted or held out now from the model, by
        learning all other rows again from the base model."""
        return self.mode == "full" and bool(self.deleted or self.held_out_trained)


def compare_revisions(
    snapshot: DatasetSnapshot, parent: Parent | None, settings: RetrainSettings
) -> TrainingData:
    """Read the rows of the new revision, and of the revision that the parent was trained on, and
    compare them.

    A row that is in both the train split and a held-out split is trained on. Raises DataError.
    """
    before, rows_before, unreadable = _read_before(snapshot.base, parent, settings)
    now = snapshot.revision
    dataset = read_dataset(now.folder, now.files, settings.data, before=before)
    check_not_empty(dataset)
    rows, held_out = divide(dataset, settings.data)
    change = _change(before, rows_before, dataset, rows)
    # No release was trained on this dataset, if the pipeline followed another one before.
    is_same = parent is not None and parent.lineage.dataset == settings.dataset
    trained_before = {row.digest for row in (rows_before if before is not None else held_out)}
    held_out_trained = frozenset(
        row.digest for row in held_out if is_same and row.digest in trained_before
    )
    evaluation = parent.evaluation if parent is not None else {}
    waiting, missed_before = (
        frozenset(row.digest for row in rows if row.short_digest in digests)
        for digests in (set(evaluation.get(key, ())) for key in ("not_trained", "missed"))
    )
    mode, reason = _choose_mode(
        settings, snapshot, parent, change, len(waiting), len(held_out_trained), unreadable
    )
    added = {row.digest for row in change.added}
    if mode == "delta":
        added |= waiting
    return TrainingData(
        mode=mode,
        reason=reason,
        digest=data_digest(rows),
        rows=rows,
        changed=tuple(row for row in rows if row.digest in added),
        known=tuple(row for row in rows if row.digest not in added),
        edited=change.edited,
        deleted=change.deleted,
        held_out=held_out,
        held_out_trained=held_out_trained,
        contradicting=frozenset(
            rows[index].digest for group in contradictions(rows) for index in group
        ),
        num_before=len(rows_before),
        num_waiting=len(waiting),
        missed_before=missed_before,
        dataset=dataset,
    )


def _change(
    before: Dataset | None, rows_before: Sequence[Row], dataset: Dataset, rows: Sequence[Row]
) -> Difference:
    """What the commit changes in the rows that are trained on.

    before: the revision before, None if it cannot be read. rows_before: its rows that were trained
    on. rows: the rows of `dataset` to train on. All rows of both train splits are compared, because
    the new version of a row may be held out.
    """
    change = difference(before.train if before is not None else (), dataset.train)
    trained_before, trained = ({row.digest for row in each} for each in (rows_before, rows))
    added = {row.digest for row in change.added} | (trained - trained_before)
    edited, deleted = [], list(change.deleted)
    for old, new in change.edited:
        # A text is edited also if its new version is held out. But an answer is then deleted:
        # otherwise nothing would teach the model to stop saying it.
        if old.text is not None or new.digest in trained:
            edited.append((old, new))
        else:
            deleted.append(old)
    # Do not unlearn rows whose answers are still in the dataset, also if they were moved to another
    # split, because the model may still say them.
    everything = tuple(chain.from_iterable(dataset.rows.values()))
    gone = trained_before.difference(row.digest for row in everything)
    deleted = [row for row in deleted if row.digest in gone]
    if deleted:
        taught = {turn for row in everything for turn in row.taught_turns}
        deleted = [row for row in deleted if not row.turns or not taught.issuperset(row.turns)]
        # Another row with the same question is learned again: the model may say the deleted answer.
        asked = {turn.question for row in deleted for turn in row.taught_turns}
        added.update(row.digest for row in rows if asked & {turn.question for turn in row.turns})
    return Difference(
        added=tuple(row for row in rows if row.digest in added),
        edited=tuple(pair for pair in edited if pair[0].digest in trained_before),
        deleted=tuple(deleted),
    )


def divide(dataset: Dataset, settings: DataSettings) -> tuple[tuple[Row, ...], tuple[Row, ...]]:
    """The rows to train on, and those to hold out. `DataSettings.held_out_ratio` describes the
    rule."""
    ratio = settings.held_out_ratio
    if ratio is None:
        is_text = not dataset.held_out and all(row.text is not None for row in dataset.train)
        ratio = HELD_OUT_RATIO if is_text and len(dataset.train) >= MIN_TEXTS else 0.0
    trained, held_out = split(dataset.train, ratio)
    return tuple(trained), (*dataset.held_out, *held_out)


def is_unchanged(data: TrainingData, parent: Parent | None, settings: RetrainSettings) -> bool:
    """Whether there is nothing to do: the parent has nothing to learn and nothing to forget, and
    the base model is the same. `RetrainSettings.skip_if` describes the rule."""
    if parent is None or settings.skip_if == "never" or settings.force_reason is not None:
        return False
    lineage = parent.lineage
    if lineage.base_model != settings.base_model or _is_base_replaced(lineage, settings):
        return False
    is_other = lineage.settings_digest != settings.train.digest()
    if data.num_waiting or (settings.skip_if == "nothing_changed" and is_other):
        return False
    nothing_to_do = data.mode == "delta" and not (data.changed or data.deleted)
    return nothing_to_do or lineage.data_digest == data.digest


def _is_base_replaced(lineage: Lineage, settings: RetrainSettings) -> bool:
    """Whether the folder of the base model has other weights now than when the parent, which has
    this lineage, was made from it. If the lineage does not say, it has the same."""
    before = lineage.base_files_digest
    return before is not None and before != files_digest(settings.base_model)


def _choose_mode(
    settings: RetrainSettings,
    snapshot: DatasetSnapshot,
    parent: Parent | None,
    change: Difference,
    num_waiting: int,
    num_moved: int,
    unreadable: str | None,
) -> tuple[Mode, str]:
    """Full or delta, and the reason. `TrainSettings.mode` describes the rule.

    num_moved: the number of held-out rows that the parent was trained on. unreadable: why the rows
    that it was trained on cannot be read any more, or None.
    """
    wanted, base_model = settings.train.mode, settings.base_model
    if wanted == "full":
        return "full", "asked for"
    if parent is None or snapshot.base is None:
        return "full", snapshot.no_delta or "there is nothing to compare with"
    lineage = parent.lineage
    if lineage.base_model != base_model:
        reason = f"release {parent.id} was trained from {lineage.base_model}, not {base_model}"
        return "full", reason
    if _is_base_replaced(lineage, settings):
        return "full", f"the weights in {base_model} changed since release {parent.id}"
    if unreadable is not None:
        return "full", unreadable
    if wanted == "delta":
        return "delta", "asked for"
    if snapshot.no_delta is not None:
        return "full", snapshot.no_delta
    if num_moved:
        # A delta would still know them, so they would not be unseen in any later measurement.
        return "full", f"{num_moved} rows that were trained on are held out now"
    if not change.added and not change.deleted:
        if num_waiting and lineage.settings_digest == settings.train.digest():
            return "delta", f"{num_waiting} rows of earlier commits are not trained yet"
        if settings.skip_if != "no_row_changed":
            return "full", "no row changed, so a training by hand starts from the base model"
        if snapshot.passed_over:
            return "full", f"no row changed since release {parent.id}, and later ones are damaged"
    if texts := sum(row.text is not None for row in change.deleted):
        return "full", f"{texts} rows of plain text were deleted"
    num_deleted = len(change.deleted)
    if num_deleted > MAX_UNLEARNED:
        return "full", f"{num_deleted} rows were deleted, more than a delta unlearns"
    return "delta", (
        f"{len(change.added)} rows are new, {len(change.edited)} were edited, and {num_deleted} "
        f"deleted, since {snapshot.base.sha[:8]}"
    )


def _read_before(
    revision: Revision | None, parent: Parent | None, settings: RetrainSettings
) -> tuple[Dataset | None, tuple[Row, ...], str | None]:
    """The revision that the parent was trained on, and its rows that were trained on; or the reason
    why they cannot be read. This is no error of the job: the settings may have changed since then,
    and nobody can correct an old revision."""
    if revision is None:
        return None, (), None
    what = f"the rows of {revision.sha[:8]}, the revision before,"
    try:
        found = read_dataset(revision.folder, revision.files, settings.data)
    except DataError as error:
        return None, (), f"{what} cannot be read: {error}"
    rows, _ = divide(found, settings.data)
    if parent is not None and parent.lineage.data_digest not in (None, data_digest(rows)):
        return None, (), f"{what} are other ones with the present settings under [pipelines.data]"
    return found, rows, None


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


def report_on(
    dataset: Dataset,
    rows: Sequence[Row],
    held_out: Sequence[Row],
    *,
    bad: Sequence[PipelineError] = (),
    elsewhere: Mapping[str, str] = {},
    num_tokens: int | None = None,
    cut: str | None = None,
) -> Iterator[str]:
    """Tells people about the rows, in lines of text. The first line is the summary.

    rows: the rows of `dataset` to train on. held_out: the rows to measure. bad: what is wrong with
    rows and files that cannot be used. (A job fails at the first one.) elsewhere: file → why it
    could not be read here. num_tokens: of `rows`. None if there is no tokenizer. cut: a line about
    rows that are too long (`too_long`)."""
    amount = f"{sum(len(text) for row in rows for text in row.texts):,} characters"
    if num_tokens is not None:
        amount = f"{num_tokens:,} tokens"
    yield f"{_count(len(rows))} to train on ({amount}), {len(held_out):,} held out to measure"
    uses = {"train": "", dataset.held_out_split: ", held out"}
    for name, files in dataset.files.splits.items():
        counts = {file: sum(row.is_learnable for row in dataset.by_file[file]) for file in files}
        listed = _listed(f"{file} {_count(count)}" for file, count in counts.items())
        if files:
            yield f"  {name}{uses.get(name, ', neither trained nor measured')}: {listed}"
    by_reason = defaultdict(list)
    for file, reason in {**dataset.files.ignored, **elsewhere}.items():
        by_reason[reason].append(file)
    for reason, names in by_reason.items():
        yield f"  ignored, {reason}: {_listed(names)}"
    if found := contradictions(rows):
        yield f"  answered in several ways, {_count(len(found), 'question')}:"
    yield from (f"    {_contradiction(group, rows)}" for group in found[:NUM_SHOWN])
    if places := [row.place for row in dataset.nothing_to_learn]:
        yield f"  nothing to learn, so left out, {_places(places)}"
    if places := [row.place for row in rows if row.has_empty_answer]:
        yield f"  learned with an empty answer, {_places(places)}"
    if cut is not None:
        yield f"  {cut}"
    if bad:
        yield f"  bad, {_count(len(bad))}:"
    yield from (f"    {each}" for each in grouped(bad))


def too_long(rows: Sequence[Row], max_length: int) -> str | None:
    """Names `rows`, which are longer than `max_length` tokens. None if there are none."""
    if not rows:
        return None
    return (
        f"longer than {max_length:,} tokens (max_length under [pipelines.train]), so a part is not "
        f"learned, {_places([row.place for row in rows])}"
    )


def _contradiction(group: Mapping[int, Turn], rows: Sequence[Row]) -> str:
    """group: the different answers to one question, by the indices of their rows."""
    first_of_each: dict[str, Row] = {}
    for index, turn in group.items():
        first_of_each.setdefault(turn.answer, rows[index])
    answers = sorted(first_of_each.items(), key=lambda each: (each[1].file, each[1].number))
    shown = _listed(f"{shortened(answer, _TEXT_SHOWN)!r} ({row.place})" for answer, row in answers)
    asked = next(iter(group.values())).asked
    return f"{shortened(asked, _TEXT_SHOWN)!r} → {shown}"


def _count(count: int, thing: str = "row") -> str:
    return f"{count:,} {thing}" if count == 1 else f"{count:,} {thing}s"


def _places(places: Sequence[str]) -> str:
    return f"{_count(len(places))}: {_listed(places)}"


def _listed(things: Iterable[str]) -> str:
    things = list(things)
    more = len(things) - NUM_SHOWN
    return ", ".join(things[:NUM_SHOWN]) + (f" and {more:,} more" if more > 0 else "")
