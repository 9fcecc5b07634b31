"""`Learning`: the part of a job that works with weights. It measures the served weights, trains,
measures the new weights on the same rows, and publishes them as a release."""

import gc
import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from pipeline.retrain import checkpoint as checkpoints
from pipeline.retrain.anchors import ANSWERS_DIR, agreement, base_answers, load_anchors
from pipeline.retrain.asking import ask
from pipeline.retrain.base_model import PRESETS, Base, find_base
from pipeline.retrain.checkpoint import Checkpoint
from pipeline.retrain.data import Mode, TrainingData, too_long
from pipeline.retrain.evaluate import GROUPS, Evaluation, MeasuredRows, Measurement, compare
from pipeline.retrain.export import export, make_probe, probe_texts, round_weights
from pipeline.retrain.job import (
    BASE,
    WRONG,
    Parent,
    RetrainJob,
    WrongAnswer,
    WrongAnswers,
    read_record,
    write_record,
)
from pipeline.retrain.layout import layout_of
from pipeline.retrain.loss import AnchorTarget, RowLoss, row_losses
from pipeline.retrain.lowrank import USUAL_TOKENS, low_rank
from pipeline.retrain.model import LoadedModel, load_model, load_tokenizer, usual_rank
from pipeline.retrain.plan import (
    TrainingPlan,
    in_turn,
    make_plan,
    sample,
    usual_made_up,
    usual_wordings,
)
from pipeline.retrain.reading import load_golden_questions
from pipeline.retrain.rows import Row
from pipeline.retrain.settings import GateSettings
from pipeline.retrain.tokens import answer_ends, leave_out, row_lengths, sequences
from pipeline.retrain.train import train
from pipeline.retrain.wordings import Wordings, questions_of
from serving.weights.publish import ManifestFields, publish_folder
from serving.weights.release import Lineage, Release

logger = logging.getLogger(__name__)

MOST_ASKED = 60
"""At most so many rows that were not learned are asked what is said in their place."""


class Learning:
    def __init__(self, job: RetrainJob, data: TrainingData, parent: Parent | None) -> None:
        """Load the served weights, or the base model if there is no parent release, and measure
        them. Raises BaseModelError and DataError."""
        # The job may be forked from a process that has imported torch already. Torch then ignores
        # the environment variables of the job.
        if job.num_threads is not None:
            torch.set_num_threads(job.num_threads)
        settings = job.settings
        self.job, self.data, self.parent = job, data, parent
        self.base = _base_model(job, data, parent)
        self.loaded = loaded = load_model(parent.folder if parent else self.base.folder, settings)
        """The served weights at first. After `train`, the new weights."""
        self._is_fresh = True
        """Whether the weights in `loaded` are unchanged since they were loaded."""
        self._ends: frozenset[int] = frozenset()
        """The tokens that end the answers of the last training."""
        self._anchors: tuple[AnchorTarget, ...] = ()
        """The base model's own answers to train on. Empty for a preset: its weights are random, so
        its answers are not worth keeping."""
        self._measured_anchors: tuple[AnchorTarget, ...] = ()
        """The base model's own answers that are only measured."""
        if settings.base_model not in PRESETS:
            self._anchors, self._measured_anchors = base_answers(
                settings.bases_dir / ANSWERS_DIR,
                self.base.identity,
                load_anchors(settings.train.anchors),
                lambda: load_model(self.base.folder, settings) if parent else loaded,
                partial(job.record_measured, event="answered"),
            )
        golden: tuple[Row, ...] = ()
        if settings.gate.golden is not None:
            golden = load_golden_questions(settings.gate.golden)
        tokenizer, max_length = loaded.tokenizer, loaded.max_length
        wordings = Wordings(
            data.rows,
            count=usual_wordings(settings),
            made_up=usual_made_up(settings),
            seed=settings.train.seed,
        )
        rewordings, words = wordings.unseen(
            [row for row in data.rows if row.has_answer and row.digest not in data.contradicting],
            [row for row in data.held_out if row.digest not in data.held_out_trained],
        )
        self._rows = replace(
            choose_rows(data, golden, tokenizer, max_length, settings.gate),
            rewordings=tuple(rewordings),
            words=words,
        )
        is_from_base = parent is not None and data.mode == "full"
        if is_from_base:
            # The base model may be a new one, with another chat template than the served weights.
            # If it refuses a row, find out now and not after the training.
            tokenizer, max_length = load_tokenizer(self.base.folder, settings)
            for group in ("held_out", "golden"):
                sequences(self._rows.groups[group], tokenizer, max_length)
        _tell_lengths(data, tokenizer, max_length)
        self._before = measure(
            loaded,
            self._rows,
            skip_refused=is_from_base,
            asks=parent is not None,
            tell=job.record_measured,
        )
        """The measurement of the served weights."""

    def turn_to_full_if_refused(self, evaluation: Evaluation) -> bool:
        """Turn to a full training if the gate refuses the weights of a delta, and return whether it
        did. A full training mends what deltas have added up, such as a drift from the base."""
        is_forced = self.job.settings.force_reason is not None
        if evaluation.passed or is_forced or self.job.trained_folder or self.data.mode == "full":
            return False
        self._choose_full()
        return True

    def _choose_full(self) -> None:
        logger.info("the gate refuses the delta; training starts from the base model")
        self.data = replace(self.data, mode="full", reason="the gate refused a delta")

    def train(self) -> Checkpoint:
        """Train, or load what the user's own trainer has trained. Afterwards, `loaded` holds the
        new weights, rounded as they will be stored."""
        if self.job.trained_folder is not None:
            self._load(self.job.trained_folder)
            return Checkpoint(mode=self.data.mode, step=0, tokens=0, name="")
        last = checkpoints.last(self.job.dir)
        if last is not None and last.mode == "full" and self.data.mode == "delta":
            self._choose_full()
        # A delta starts from the parent release, a full training from the base model.
        is_delta = self.data.mode == "delta"
        start = self.parent.folder if self.parent and is_delta else self.base.folder
        if not self._is_fresh or start != self.loaded.folder:
            self._load(start)
        plan = self._plan()
        self._ends = answer_ends(
            (plan.sequences[index] for index in plan.counted), self.loaded.tokenizer
        )
        if last is None or not last.finished or last.mode != self.data.mode:
            logger.info(
                f"{len(plan.rows_of(plan.learned)):,} rows to learn; the budget is "
                f"{plan.max_tokens:,} tokens"
            )
        self._is_fresh = False
        checkpoint = _train_plan(self.job, self.loaded.model, plan, self.data.mode)
        if self.loaded.model.device.type == "meta":  # several processes have trained
            gc.collect()  # their parts of the weights, which refer to each other
            self._load(start)
            checkpoint = _train_plan(self.job, self.loaded.model, plan, self.data.mode)
        round_weights(self.loaded.model, self.loaded.dtype)
        return checkpoint

    def evaluate(self, checkpoint: Checkpoint) -> Evaluation:
        after = measure(
            self.loaded, self._rows, self._measured_anchors, tell=self.job.record_measured
        )
        write_record(self.job.dir / WRONG, self._wrong_answers(after))
        return compare(
            self._rows,
            self._before,
            after,
            self.job.settings.gate,
            self.data,
            checkpoint,
            against=self.parent.id if self.parent is not None else self.job.settings.base_model,
            tokens_before=self._tokens_before() if self.data.mode == "delta" else 0,
        )

    def _wrong_answers(self, after: Measurement) -> WrongAnswers:
        """What is said to the questions in other words, and to the changed rows that were not
        learned, if it is not the answer of the row."""
        changed = self._rows.groups["changed"]
        missed = [changed[loss.row] for loss in after.losses["changed"] if not loss.is_learned]
        asked = ask(self.loaded, [row for row in missed if row.has_answer][:MOST_ASKED])
        places = {row.answer.strip(): row.place for row in self.data.rows if row.answer}
        return WrongAnswers(
            answers=tuple(
                WrongAnswer(
                    place=each.row.place,
                    question=each.row.last_question or "",
                    is_reworded=is_reworded,
                    wanted=each.wanted,
                    said=each.said,
                    answer_of=places.get(each.said),
                )
                for is_reworded, group in ((False, asked), (True, after.reworded or ()))
                for each in group
                if (not each.is_right if is_reworded else each.said != each.wanted)
            )
        )

    def export(self, evaluation: Evaluation, origin: Lineage) -> Release:
        """origin: the lineage without what is known only here."""
        job, loaded, data = self.job, self.loaded, self.data
        groups = (data.changed, data.known, data.held_out)
        texts = probe_texts(groups, loaded.tokenizer, loaded.max_length)
        manifest = ManifestFields(
            lineage=origin,
            evaluation=evaluation.model_dump(mode="json"),
            probe=make_probe(loaded.model, texts),
        )
        if job.trained_folder is not None:
            return publish_folder(job.pipeline_dir, job.trained_folder, **manifest)
        told: dict[str, Any] = {
            "base_model": job.settings.base_model,
            "base_revision": self.base.revision,
            "base_files_digest": self.base.files_digest,
            "data_digest": data.digest,
            "mode": data.mode,
            "rows": tuple(sorted({row.kind for row in data.rows})),
            "settings_digest": job.settings.train.digest(),
        }
        if data.mode == "full":
            told |= {"parent": None, "dataset_base_revision": None}
        if not evaluation.passed:
            reasons = "; ".join(evaluation.refusals)
            told["forced"] = f"{job.settings.force_reason} ({reasons})"
        manifest["lineage"] = Lineage.model_validate(origin.model_dump() | told)
        questions = questions_of(row for row in data.rows if row.digest not in data.contradicting)
        return export(loaded, job.pipeline_dir, self._ends, questions, **manifest)

    def _plan(self) -> TrainingPlan:
        known = self._rows.groups["known"]
        return make_plan(
            self.data,
            self.loaded.tokenizer,
            self.job.settings,
            max_length=self.loaded.max_length,
            anchors=self._anchors,
            said=[
                known[loss.row]
                for loss in self._before.losses["known"]
                if loss.is_learned and known[loss.row].has_answer
            ],
            tokens_before=self._tokens_before(),
        )

    def _load(self, folder: Path) -> None:
        del self.loaded.model  # so that memory never holds two models
        self.loaded = load_model(folder, self.job.settings)
        self._is_fresh = True

    def _tokens_before(self) -> int:
        """How many tokens were trained on from the base model to the parent release."""
        return int(self.parent.evaluation.get("total_tokens", 0)) if self.parent is not None else 0


def _tell_lengths(data: TrainingData, tokenizer: PreTrainedTokenizerBase, max_length: int) -> None:
    """Log what the report at the job's start could not say, because it had no tokenizer. For a
    delta, only of the changed rows: its time must not depend on the size of the dataset."""
    rows, what = (data.changed, "changed") if data.mode == "delta" else (data.rows, "all")
    num_tokens, cut = row_lengths(rows, tokenizer, max_length)
    logger.info("%s rows have %s tokens", what, f"{num_tokens:,}")
    if line := too_long(cut, max_length):
        logger.info(line)


def _train_plan(
    job: RetrainJob, model: PreTrainedModel, plan: TrainingPlan, mode: Mode
) -> Checkpoint:
    settings = job.settings
    rank = usual_rank(settings)
    # Before the matrices: without autocast, they do not fit to weights in 16 bits.
    layout_of(model)
    answers = [anchor.sequence for anchor in plan.anchors]
    known = [plan.sequences[index] for index in plan.replayed]
    kept = [
        text
        for texts in (answers, known)
        for text in in_turn(texts, 0, USUAL_TOKENS, lambda each: each)
    ]
    with low_rank(model, rank, settings.train.seed, kept) if rank else nullcontext():
        return train(model, plan, settings.train, job_dir=job.dir, mode=mode, metrics=job.metrics)


def _base_model(job: RetrainJob, data: TrainingData, parent: Parent | None) -> Base:
    """The base model of this job. It is recorded in the job's folder, so that all attempts of the
    job use the same one."""
    path = job.dir / BASE
    base = read_record(path, Base)
    if base is not None and base.folder.is_dir():
        return base
    settings = job.settings
    endpoint, token = job.hubs.address(settings.base_model_endpoint)
    is_same = parent is not None and parent.lineage.base_model == settings.base_model
    base = find_base(
        settings.base_model,
        settings.bases_dir,
        data.rows,
        pipeline=settings.pipeline,
        seed=settings.train.seed,
        endpoint=endpoint,
        token=token,
        pinned=parent.lineage.base_revision if parent is not None and is_same else None,
    )
    write_record(path, base)
    return base


def measure(
    loaded: LoadedModel,
    rows: MeasuredRows,
    anchors: Sequence[AnchorTarget] = (),
    *,
    skip_refused: bool = False,
    asks: bool = True,
    tell: Callable[[int, int], None],
) -> Measurement:
    """Measure the weights on `rows`, and on the base model's own answers to `anchors` if there are
    any.

    skip_refused: leave out the rows that the chat template of the weights refuses, instead of
    raising DataError or BaseModelError. Deleted rows that it refuses are always left out, because
    nobody can correct them any more. asks: whether to ask the rewordings too. tell: called after
    each batch, with the number of rows that are measured, and the number of all rows to measure. A
    piece of a long row counts as a row, and so does an answer of the base model.
    """
    found = {}
    for name in GROUPS:
        skips = {"on_refused": leave_out} if skip_refused or name == "deleted" else {}
        found[name] = sequences(rows.groups[name], loaded.tokenizer, loaded.max_length, **skips)
    expected = sum(map(len, found.values())) + len(anchors)
    measured = 0

    def on_batch(count: int) -> None:
        nonlocal measured
        measured += count
        tell(measured, expected)

    def losses(name: str) -> list[RowLoss]:
        if found[name]:
            logger.info("measuring %s %s", f"{len(rows.groups[name]):,}", GROUPS[name])
        return row_losses(loaded.model, found[name], on_batch)

    if anchors:
        logger.info("measuring %d answers of the base model", len(anchors))
    return Measurement(
        base_agreement=agreement(loaded.model, anchors, on_batch) if anchors else None,
        reworded=ask(loaded, rows.rewordings) if asks else None,
        losses={name: losses(name) for name in GROUPS},
    )


def choose_rows(
    data: TrainingData,
    golden: Sequence[Row],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    gate: GateSettings,
) -> MeasuredRows:
    """Choose the rows to measure. max_length: the largest number of tokens of a sequence. Longer
    answers are cut."""

    def some(rows: Sequence[Row]) -> tuple[Row, ...]:
        def size_of(index: int) -> int:
            """About how many tokens a measurement of the row computes. A text is measured whole. A
            longer conversation has a sequence for each answer."""
            row = rows[index]
            text = row.text or str(row.messages or f"{row.prompt}{row.completion}")
            size = len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
            return min(size, max_length * len(row.turns)) if row.has_answer else size

        return tuple(rows[index] for index in sample(len(rows), size_of, gate.max_tokens))

    new, known = (
        [row for row in rows if row.digest not in data.contradicting]
        for rows in (data.changed, data.known)
    )
    changed = some(new)
    measured = set(changed)
    return MeasuredRows(
        groups={
            "changed": changed,
            "known": some(known),
            "deleted": some([row for row in data.deleted if row.has_answer]),
            "held_out": some(data.held_out),
            "golden": tuple(golden),
        },
        unmeasured=tuple(row for row in new if row.has_answer and row not in measured),
    )
