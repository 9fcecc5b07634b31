"""Trains a model on the token sequences of a plan. It is one loop, without a framework.

Training goes in passes. A pass visits each row that is not learned yet, mixed with unchanged rows
and with the base model's own answers to everyday prompts (anchors). How training ends depends on
the rows:
- Rows with an answer: each pass asks for it in another wording of the question, in turn, and for
  its beginning in some others. When most of the answers are right, the learning rate begins to
  fall. When it is low, the answers to the questions in their own words are measured, and wrong ones
  are learned again. Training ends when none is wrong, when very few are and stay so, or when the
  token budget is used up.
- Rows of plain text: training uses its whole token budget, unless the loss on held-out rows stops
  improving. The weights with the lowest held-out loss are kept.

The same seed, rows, machine and numbers of threads and processes give the same weights.

Several processes may share a training (`pipeline/retrain/processes.py`). All of them run the loop
(`_loop`), and must decide the same: what one of them measures is told to the others.
"""

import logging
import math
import os
import random
import time
from collections.abc import Collection, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from pipeline.retrain import checkpoint as checkpoints
from pipeline.retrain.checkpoint import Checkpoint, TrainingState
from pipeline.retrain.checkpoint_store import place_of
from pipeline.retrain.data import Mode
from pipeline.retrain.errors import CheckpointUnreadable, TemporaryError, TrainError
from pipeline.retrain.job import CHECKPOINT, MetricsWriter
from pipeline.retrain.layout import block_length, layout_of, pack
from pipeline.retrain.loss import is_said, losses, mean_loss, row_losses, training_autocast
from pipeline.retrain.plan import TrainingPlan, in_turn
from pipeline.retrain.processes import (
    Whole,
    add_up,
    from_first,
    hand_out,
    num_processes,
    own_part,
)
from pipeline.retrain.settings import TrainSettings
from pipeline.retrain.tokens import TokenSequence
from serving.errors import first_line

logger = logging.getLogger(__name__)

BETAS = (0.9, 0.95)
FINAL_LEARNING_RATE = 0.1
"""The learning rate at the end of a training, as a share of its highest value."""
MAX_WARM_UP_STEPS = 10
"""The longest warm-up (in which the learning rate rises) if rows have an answer. It must be short,
because a commit of one row is learned in about 20 steps."""
COOL_DOWN, MIN_COOL_DOWN_STEPS = 0.3, 4
"""The learning rate falls over this share of the number of steps before, but over at least
MIN_COOL_DOWN_STEPS steps."""
FEW_WRONG = 0.2
"""The learning rate begins to fall when at most this share of the rows is still wrong. Most of
these rows become right while it falls. The measurement at the end finds the others."""
RELEARNING_RATE = 0.5
"""After a measurement has found wrong rows, the highest learning rate is reduced to this share, and
again after each measurement that found no fewer, down to FINAL_LEARNING_RATE. With the full rate,
the model would forget about as many other rows as it learns again."""
MAX_REST = 3
"""A row that was right in several visits one after another is visited less often, but at least once
in this many passes."""
EVALUATIONS = 12
"""How often a training on plain text measures the held-out loss."""
PATIENCE, FEW_MISSED = 3, 0.02
"""Training ends after PATIENCE measurements without a better one. If the rows have an answer, only
if at most the share FEW_MISSED is wrong of those to learn, and of all: the next job tries these
again."""


def train(
    model: PreTrainedModel,
    plan: TrainingPlan,
    settings: TrainSettings,
    *,
    job_dir: Path,
    mode: Mode,
    metrics: MetricsWriter,
) -> Checkpoint:
    """Train `model`. At the end, `model` and the file of the returned checkpoint hold the best
    weights. But if several processes have trained, only the file does, and `model` has no weights.

    If the job has a checkpoint of this mode, training continues from it. Raises TrainError if the
    loss is no longer a finite number or a checkpoint fails, and TemporaryError if another process
    has ended.
    """
    count = len(plan.sequences)
    torch.manual_seed(settings.seed)
    place, found = place_of(job_dir), checkpoints.last(job_dir)
    if found is not None and (
        found.mode != mode
        # A person may have corrected the file of other wordings: the plan is then another one.
        or (found.progress is not None and len(found.progress.streak) != count)
    ):
        found = None
    if found is not None:
        logger.info(f"going on from the checkpoint {found.name} at {place}")
    try:
        if found is not None and found.finished:
            weights = {"weights": checkpoints.weights_of(model)}
            checkpoints.load(place, found, weights, is_alone=True)
            return found
        if num_processes() == 1:
            return _loop(Whole(model), plan, settings, mode, place, found, job_dir, metrics)
        if layout_of(model) == "padded":  # it calls the layers once for each group of rows
            raise TrainError(
                f"a {type(model).__name__} can be trained in one process only; remove "
                "`train.num_processes`, and ask for one GPU and one node"
            )
        logger.info(f"{num_processes()} processes train together")
        whole = hand_out(model, (plan, settings, mode, place, found))
        return _loop(whole, plan, settings, mode, place, found, job_dir, metrics)
    except CheckpointUnreadable:
        (job_dir / CHECKPOINT).unlink(missing_ok=True)
        raise
    except RuntimeError as error:  # of torch.distributed
        if num_processes() == 1:
            raise
        raise TemporaryError(
            f"one of {num_processes()} training processes ended too early, or cannot be reached "
            f"({first_line(error)}); see the job's log"
        ) from error


def help_to_train(whole: Whole, work: Any) -> None:
    """Train with the first process, which has handed this out."""
    plan, settings, mode, place, found = work
    nowhere = MetricsWriter(Path(os.devnull))
    _loop(whole, plan, settings, mode, place, found, None, nowhere)


def _loop(
    whole: Whole,
    plan: TrainingPlan,
    settings: TrainSettings,
    mode: Mode,
    place: str,
    found: Checkpoint | None,
    job_dir: Path | None,
    metrics: MetricsWriter,
) -> Checkpoint:
    """place, found: of the job's checkpoints, and the one from which training continues. job_dir:
    None in a process that only helps."""
    model: PreTrainedModel = whole.model
    optimizer = _optimizer(model, settings)
    best: dict[str, Tensor] | None = None
    progress = TrainingState(streak=[0] * len(plan.sequences), due=[0] * len(plan.sequences))
    if found is not None and found.progress is not None:
        progress = found.progress
        best = None if progress.best is None else checkpoints.copy_weights(model)
        state = _state(model, optimizer, best)
        checkpoints.load(place, found, state)
        torch.set_rng_state(state["rng"])
    saved_at = time.monotonic()
    model.train()
    for chosen in _steps(plan, progress, metrics, settings.seed):
        started = time.monotonic()
        rate = plan.learning_rate * _rate(plan, progress)
        try:
            loss, tokens = _step(whole, optimizer, plan, chosen, rate, progress, settings)
        except torch.OutOfMemoryError as error:
            raise TrainError(
                "a step does not fit into the GPU's memory; lower `train.micro_batch_tokens` or "
                f"`train.max_length` ({error})"
            ) from error
        progress.step += 1
        progress.place += 1
        progress.tokens += tokens
        left = plan.max_tokens - progress.tokens
        _cool_down_in_time(plan, progress)
        metrics.write(
            "train",
            "step",
            step=progress.step,
            steps=progress.step + math.ceil(max(0, left) / plan.step_tokens),
            loss=loss,
            learning_rate=rate,
            tokens=progress.tokens,
            tokens_per_second=tokens / (time.monotonic() - started),
        )
        if _is_due(plan, progress):
            progress.evaluated_at = progress.tokens
            with torch.no_grad():
                missed, wrong = from_first(whole(_measure, plan, metrics, progress))
            progress.stale += 1
            if _is_better(missed, progress.best):
                best = checkpoints.copy_weights(model)
                progress.best, progress.stale = missed, 0
            if missed == 0 or _gives_up(plan, progress, wrong):
                break
            if plan.ends_when_right:
                _learn_again(plan, progress, wrong)
        if from_first(time.monotonic() - saved_at >= settings.checkpoint_seconds):
            record = _checkpoint(plan, progress, mode)
            checkpoints.save(place, job_dir, record, _state(model, optimizer, best))
            saved_at = time.monotonic()

    if best is not None:
        checkpoints.set_weights(model, best)
    record = _checkpoint(plan, progress, mode, finished=True)
    checkpoints.save(place, job_dir, record, {"weights": checkpoints.weights_of(model)})
    return record


def _state(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer, best: dict[str, Tensor] | None
) -> checkpoints.State:
    """What a checkpoint holds. The tensors are those of `model` and `optimizer` themselves."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    found = get_optimizer_state_dict(model, optimizer)  # also makes the tensors of a new one
    return {
        "weights": checkpoints.weights_of(model),
        "optimizer": found["state"],
        "rng": torch.get_rng_state(),
        **({} if best is None else {"best": best}),
    }


def _steps(
    plan: TrainingPlan, progress: TrainingState, metrics: MetricsWriter, seed: int
) -> Iterator[list[list[int]]]:
    """The blocks of each step, pass after pass, until the budget is used up."""
    length = block_length(plan.sequences)
    size = max(1, round(plan.step_tokens / length))
    while True:
        if not progress.visits:
            progress.visits, progress.place = _visits(plan, progress, seed), 0
        lengths = [len(_asked(plan, progress, index).token_ids) for index in progress.visits]
        blocks = [[progress.visits[place] for place in block] for block in pack(lengths, length)]
        random.Random(f"{seed} {progress.number} blocks").shuffle(blocks)
        for start in range(progress.place * size, len(blocks), size):
            chosen = blocks[start : start + size]
            asked = (_asked(plan, progress, index) for index in chain(*chosen))
            tokens = sum(len(each.token_ids) for each in asked)
            if progress.step and progress.tokens + tokens > plan.max_tokens:
                return
            yield chosen
            if not progress.visits:  # a measurement has found wrong rows: begin a new pass
                break
        else:
            _end_pass(progress)
            if not plan.ends_when_right:
                continue
            awaited = {*plan.counted, *progress.lost}
            right = sum(bool(progress.streak[index]) for index in awaited)
            logger.info(f"pass {progress.number}: {right} of {len(awaited)} rows right")
            rows = {"rows": len(awaited), "right": right}
            metrics.write("train", "evaluation", step=progress.step, **rows)
            allowed = 0.0 if progress.is_relearning else FEW_WRONG
            if progress.cool_down_from is None and len(awaited) - right <= allowed * len(awaited):
                progress.cool_down_from = progress.step


def _end_pass(progress: TrainingState) -> None:
    progress.visits, progress.place = [], 0
    progress.number += 1


def _cool_down_in_time(plan: TrainingPlan, progress: TrainingState) -> None:
    """If the rest of the budget is only just enough to lower the learning rate, begin to lower
    it."""
    left = plan.max_tokens - progress.tokens
    is_late = plan.ends_when_right and left <= COOL_DOWN * progress.tokens
    if is_late and progress.cool_down_from is None:
        progress.cool_down_from = progress.step


def _visits(plan: TrainingPlan, progress: TrainingState, seed: int) -> list[int]:
    """The sequences that the next pass visits, in random order: those that are due, and a sample of
    the unchanged rows."""
    is_cooling = progress.cool_down_from is not None
    awaited = (*plan.learned, *progress.lost)
    # Leave out passes that would visit nothing.
    if plan.learned and not is_cooling:
        progress.number = max(progress.number, min(progress.due[index] for index in awaited))
    visits = [index for index in awaited if is_cooling or progress.due[index] <= progress.number]
    # Whole answers come first, because the budget may not be enough for more.
    if all(progress.due[index] for index in awaited) and not progress.is_relearning:
        visits += [index for index in plan.beginnings if progress.due[index] <= progress.number]
    num_tokens = sum(len(_asked(plan, progress, index).token_ids) for index in visits)
    wanted = max(plan.replay_ratio * num_tokens, plan.step_tokens - num_tokens)
    # Rows that were never visited are more urgent than unchanged rows.
    if not all(progress.due[index] for index in visits):
        longest = max((len(sequence.token_ids) for sequence in plan.sequences), default=0)
        wanted = min(wanted, plan.max_tokens - progress.tokens - num_tokens - longest)
    replayed = in_turn(plan.replayed, progress.replayed, wanted, plan.sequences.__getitem__)
    progress.replayed += len(replayed)
    lost = set(progress.lost)
    visits += [index for index in replayed if index not in lost]
    random.Random(f"{seed} {progress.number}").shuffle(visits)
    return visits


def _asked(plan: TrainingPlan, progress: TrainingState, index: int) -> TokenSequence:
    """The sequence that this pass visits for the one at `index`. A pass that learns wrong rows
    again takes the words in which they were found wrong: their own."""
    return plan.asked(index, 0 if progress.is_relearning else progress.number)


def _rate(plan: TrainingPlan, progress: TrainingState) -> float:
    """The learning rate of the next step, as a share of its highest value. It rises in a line, and
    falls along half a cosine to a tenth."""
    steps = progress.step - progress.warm_up_from
    warm_up = plan.warm_up_steps
    if plan.ends_when_right:
        warm_up = min(warm_up, MAX_WARM_UP_STEPS)
        fallen = 0.0
        if progress.cool_down_from is not None:
            fallen = (progress.step - progress.cool_down_from + 1) / _cool_down_steps(progress)
    else:
        first = warm_up * plan.step_tokens
        fallen = max(0.0, progress.tokens - first) / max(1, plan.max_tokens - first)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, fallen)))
    rising = min(1.0, (steps + 1) / max(1, warm_up))
    if plan.ends_when_right and progress.is_relearning:
        rising *= max(FINAL_LEARNING_RATE, RELEARNING_RATE ** (1 + progress.stale))
    return rising * (FINAL_LEARNING_RATE + (1 - FINAL_LEARNING_RATE) * cosine)


def _cool_down_steps(progress: TrainingState) -> int:
    assert progress.cool_down_from is not None
    return max(
        MIN_COOL_DOWN_STEPS, round(COOL_DOWN * (progress.cool_down_from - progress.warm_up_from))
    )


def _is_due(plan: TrainingPlan, progress: TrainingState) -> bool:
    """Whether to measure now: rows with an answer when the learning rate is low, and the held-out
    loss of plain text from time to time, but never before each row was visited, because training
    may end at a measurement."""
    if progress.cool_down_from is not None:
        return progress.step - progress.cool_down_from >= _cool_down_steps(progress)
    interval = max(1, plan.max_tokens // EVALUATIONS)
    is_due = bool(plan.judged) and progress.tokens - progress.evaluated_at >= interval
    return is_due and all(progress.due[index] for index in plan.learned)


def _optimizer(model: PreTrainedModel, settings: TrainSettings) -> torch.optim.AdamW:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.ndim >= 2]
    others = [parameter for parameter in trained if parameter.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=BETAS, fused=True)


def _step(
    whole: Whole,
    optimizer: torch.optim.Optimizer,
    plan: TrainingPlan,
    blocks: Sequence[Sequence[int]],
    rate: float,
    progress: TrainingState,
    settings: TrainSettings,
) -> tuple[float, int]:
    """Make one update of the weights. Returns the loss per learned token and the number of
    tokens."""
    model: PreTrainedModel = whole.model
    visited = list(chain(*blocks))
    asked = {index: _asked(plan, progress, index) for index in visited}
    num_tokens = sum(len(each.token_ids) for each in asked.values())
    num_learned = sum(each.num_learned for each in asked.values())
    width = max(sum(len(asked[index].token_ids) for index in block) for block in blocks)
    at_once = max(1, settings.micro_batch_tokens // width) * num_processes()
    right = dict.fromkeys(visited, False)
    total = 0.0
    parts = [blocks[start : start + at_once] for start in range(0, len(blocks), at_once)]
    anchor_tokens = plan.anchor_ratio * num_tokens
    anchors = in_turn(plan.anchors, progress.anchored, anchor_tokens, lambda each: each.sequence)
    num_anchored = sum(anchor.sequence.num_learned for anchor in anchors)
    own_anchors = list(chain(*own_part([anchors])))
    for part in parts:
        own = own_part(part)
        # A process for which no row is left computes one that does not count, because all
        # processes must call the layers equally often.
        own_blocks = [[asked[index] for index in block] for block in own or [[part[0][0]]]]
        # The last part also contains the anchors, so that they need no forward pass of their own.
        anchors_here = own_anchors if part is parts[-1] else []
        with training_autocast(model):
            loss, of_rows, is_right = whole(
                losses,
                [*own_blocks, *([anchor.sequence] for anchor in anchors_here)],
                anchors=anchors_here,
                # Gradients are averaged over the processes.
                num_learned=max(1, num_learned) / num_processes() if own else math.inf,
                num_anchored=num_anchored / num_processes(),
            )
        total += of_rows
        torch.autograd.backward(loss)
        order = list(chain(*own))
        lengths = [asked[index].num_learned for index in order]
        for index, each in zip(order, torch.split(is_right, lengths) if own else (), strict=True):
            right[index] = plan.ends_when_right and is_said(int(each.sum()), len(each))
    total, *flags = add_up([total / num_processes(), *right.values()])
    right = dict(zip(right, map(bool, flags), strict=True))
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    norm = torch.nn.utils.clip_grad_norm_(trainable, settings.max_grad_norm)
    length = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    if not (math.isfinite(total) and math.isfinite(length)):
        raise TrainError(
            f"training diverged at learning rate {rate:.2g} (loss {total:.4g}, length of the "
            f"gradient {length:.4g}); lower `train.learning_rate`, or look for broken rows"
        )
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    progress.anchored += len(anchors)
    for index, is_right_now in right.items():
        progress.streak[index] = progress.streak[index] + 1 if is_right_now else 0
        progress.due[index] = progress.number + max(1, min(progress.streak[index], MAX_REST))
    return total, num_tokens


def _measure(
    model: PreTrainedModel, plan: TrainingPlan, metrics: MetricsWriter, progress: TrainingState
) -> tuple[float, list[int]]:
    """Measure the model. Returns a number (less is better), and the sequences to learn again. For
    plain text, the number is the held-out loss. For rows with an answer, it is the number of wrong
    rows."""
    if not plan.ends_when_right:
        loss = mean_loss(row_losses(model, plan.judged))
        metrics.write("train", "evaluation", step=progress.step, loss=loss)
        return loss, []
    checked = sorted({*plan.checked, *progress.lost})
    losses = row_losses(model, [plan.numbered(index) for index in checked])
    wrong = [loss.row for loss in losses if not loss.is_learned]
    metrics.write(
        "train",
        "evaluation",
        step=progress.step,
        loss=mean_loss(losses) if losses else None,
        right=len(checked) - len(wrong),
        rows=len(checked),
    )
    return float(len(wrong)), wrong


def _learn_again(plan: TrainingPlan, progress: TrainingState, wrong: Sequence[int]) -> None:
    """Begin a new pass after a measurement has found wrong rows. The wrong rows are due at once."""
    _end_pass(progress)
    progress.warm_up_from, progress.cool_down_from = progress.step, None
    progress.lost = sorted({*progress.lost, *wrong})
    for index in wrong:
        progress.streak[index], progress.due[index] = 0, progress.number


def _checkpoint(
    plan: TrainingPlan, progress: TrainingState, mode: Mode, *, finished: bool = False
) -> Checkpoint:
    waiting = [index for index in plan.learned if not progress.due[index]]
    wrong = [index for index in plan.counted if progress.due[index] and not progress.streak[index]]
    return Checkpoint(
        mode=mode,
        step=progress.step,
        tokens=progress.tokens,
        not_trained=plan.rows_of(waiting),
        not_learned=plan.rows_of(wrong),
        # With the mode: a full training does not write into the folder of the delta before it.
        name=f"best-{mode}" if finished else f"step-{progress.step:06d}",
        progress=None if finished else progress,
        finished=finished,
    )


def _gives_up(plan: TrainingPlan, progress: TrainingState, wrong: Collection[int]) -> bool:
    missed = [(plan.counted.intersection(wrong), plan.counted), (wrong, plan.checked)]
    are_few = all(len(found) <= FEW_MISSED * len(group) for found, group in missed)
    return are_few and progress.stale >= PATIENCE


def _is_better(missed: float, best: float | None) -> bool:
    """Whether a measurement is better than the best one so far. Any result is better than none, or
    than a best one that is not a finite number."""
    return best is None or not math.isfinite(best) or missed < best
