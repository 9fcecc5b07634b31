"""Token sequences → better weights: one loop, no framework.

Packed blocks, fused AdamW, warm-up and cosine, clipping, early stop on the held-out loss; the best
weights are kept. The same seed, rows, machine and number of threads give the same weights.
"""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, islice, takewhile
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pipeline.retrain import checkpoint as checkpoints
from pipeline.retrain.averaging import average
from pipeline.retrain.checkpoint import Checkpoint, State
from pipeline.retrain.errors import TrainError
from pipeline.retrain.job_folder import CHECKPOINTS_DIR
from pipeline.retrain.lora import first_factors
from pipeline.retrain.loss import summed_loss
from pipeline.retrain.metrics import MetricsWriter
from pipeline.retrain.packing import batch, block_length, epochs
from pipeline.retrain.processes import add_up, from_first, rank, world_size
from pipeline.retrain.scoring import autocast, mean_loss, predict, row_losses
from pipeline.retrain.settings import TrainSettings
from pipeline.retrain.tokens import Sequence as TokenSequence

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BETAS = (0.9, 0.95)
USUAL_STEPS = 1_000
MIN_STEP_TOKENS, MAX_STEP_TOKENS = 128, 4_096
FINAL_LEARNING_RATE = 0.1
"""Of the peak, at the last step."""
AVERAGING_EVALUATIONS = 4
"""An average is measured on as many held-out tokens as so many evaluations."""


@dataclass(frozen=True, kw_only=True)
class Lessons:
    """What one training sees."""

    training: Sequence[TokenSequence]
    held_out: Sequence[Sequence[TokenSequence]]
    """Groups that count alike in the choice of the best weights: of the new range, known before."""
    learning_rate: float
    """At the peak."""
    max_tokens: int
    max_epochs: float
    min_trained_share: float = 1.0
    """Below 1, the best weights are averaged with those that the training started from, as far as
    this, where that is better on the held-out rows of both groups together."""

    @property
    def may_average(self) -> bool:
        """Both kinds of rows have a say, or there is nothing to weigh against each other."""
        return self.min_trained_share < 1 and all(self.held_out)


@dataclass(frozen=True, kw_only=True)
class Plan:
    block_length: int
    blocks_per_step: int
    blocks: int
    """Of all steps; the last step may have fewer than the others."""

    @property
    def steps(self) -> int:
        return math.ceil(self.blocks / self.blocks_per_step)

    @classmethod
    def of(cls, lessons: Lessons, settings: TrainSettings) -> "Plan":
        """As many blocks as the epochs and the tokens of `lessons` allow, and one at least."""
        lengths = [len(sequence.token_ids) for sequence in lessons.training]
        length = block_length(lessons.training)
        num_tokens = min(lessons.max_epochs * sum(lengths), lessons.max_tokens)
        step_tokens = settings.tokens_per_step or min(
            MAX_STEP_TOKENS, max(MIN_STEP_TOKENS, num_tokens / USUAL_STEPS)
        )
        blocks = chain.from_iterable(epochs(lessons.training, length, settings.seed))
        ends = accumulate(sum(lengths[index] for index in block) for block in blocks)
        fitting = sum(1 for _ in takewhile(lambda end: end <= num_tokens, ends))
        return cls(
            block_length=length,
            blocks_per_step=max(1, round(step_tokens / length)),
            blocks=max(1, fitting),
        )


def train(
    model: "PreTrainedModel",
    lessons: Lessons,
    settings: TrainSettings,
    *,
    job_dir: Path,
    job_id: str,
    metrics: MetricsWriter,
) -> Checkpoint:
    """Train `model` in place and leave the best weights in it, and in the returned checkpoint.

    Goes on from the job's last checkpoint where there is one. Raises TrainError when the loss is no
    longer a number.
    """
    plan = Plan.of(lessons, settings)
    optimizer = _optimizer(model, settings)
    done = Checkpoint(job_id=job_id, step=0, steps=plan.steps, tokens=0, file="")
    best: dict[str, Tensor] | None = None
    before = checkpoints.copy_weights(model) if lessons.may_average and rank() == 0 else None
    if (found := checkpoints.load(job_dir)) is not None:
        done, state = found
        checkpoints.set_weights(model, state["weights"])
        if done.finished:
            return done
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"])
        if state["best"] is not None:
            best = {name: tensor.to(model.device) for name, tensor in state["best"].items()}
    else:
        torch.manual_seed(settings.seed)

    interval = math.ceil(plan.steps / settings.evaluations)
    measured = _measured(lessons.held_out, settings.evaluation_tokens)
    blocks = _steps(lessons.training, plan, settings.seed, skip=done.step)
    saved_at = time.monotonic()
    is_first = rank() == 0
    model.train()
    while not _is_over(done, settings):
        started = time.monotonic()
        rate = learning_rate(done.step, plan.steps, lessons.learning_rate, settings.warmup_ratio)
        loss, tokens = _step(model, optimizer, lessons.training, next(blocks), rate, settings)
        done = done.model_copy(update={"step": done.step + 1, "tokens": done.tokens + tokens})
        if is_first:
            metrics.write(
                "train",
                "step",
                step=done.step,
                steps=plan.steps,
                loss=loss,
                learning_rate=rate,
                tokens=done.tokens,
                tokens_per_second=tokens / (time.monotonic() - started),
            )
        if done.step % interval == 0 or done.step == plan.steps:
            held_out = from_first(
                _balanced_loss(model, measured) if is_first else math.nan, model.device
            )
            if is_first:
                metrics.write(
                    "train", "evaluation", step=done.step, steps=plan.steps, loss=held_out
                )
            if _is_better(held_out, done.best_loss):
                best = checkpoints.copy_weights(model)
                done = done.model_copy(
                    update={"best_step": done.step, "best_loss": held_out, "stale": 0}
                )
            else:
                done = done.model_copy(update={"stale": done.stale + 1})
        if is_first and time.monotonic() - saved_at >= settings.checkpoint_seconds:
            done = done.model_copy(update={"file": f"{CHECKPOINTS_DIR}/step-{done.step:06d}.pt"})
            checkpoints.save(job_dir, done, _state(model, optimizer, best))
            saved_at = time.monotonic()

    if best is None:
        raise AssertionError("the last step is always measured")
    checkpoints.set_weights(model, best)
    if before is not None:
        groups = _measured(lessons.held_out, AVERAGING_EVALUATIONS * settings.evaluation_tokens)
        sizes = [sum(row.num_learned for row in group) for group in lessons.held_out]
        share, loss = average(
            model,
            before | first_factors(best),
            best,
            lambda: _loss_of_all(model, groups, sizes),
            least=lessons.min_trained_share,
        )
        done = done.model_copy(update={"trained_share": share})
        metrics.write("train", "average", share=share, loss=loss)
    done = done.model_copy(update={"file": f"{CHECKPOINTS_DIR}/best.pt", "finished": True})
    if is_first:
        checkpoints.save(job_dir, done, {"weights": checkpoints.weights_of(model)})
    return done


def _is_better(loss: float, best: float | None) -> bool:
    """One that is no number is better than nothing, and than another that is none."""
    return best is None or not math.isfinite(best) or (math.isfinite(loss) and loss < best)


def _is_over(done: Checkpoint, settings: TrainSettings) -> bool:
    return (
        done.step == done.steps
        or done.stale == settings.patience
        or (done.best_loss is not None and done.best_loss <= settings.enough_loss)
    )


def learning_rate(step: int, steps: int, peak: float, warmup_ratio: float) -> float:
    """A line up over the first steps, then half a cosine down to a tenth of the peak."""
    warmup = max(1, round(warmup_ratio * steps))
    if step < warmup:
        return peak * (step + 1) / warmup
    passed = (step - warmup) / max(1, steps - warmup)
    return peak * (
        FINAL_LEARNING_RATE + (1 - FINAL_LEARNING_RATE) * 0.5 * (1 + math.cos(math.pi * passed))
    )


def _optimizer(model: "PreTrainedModel", settings: TrainSettings) -> torch.optim.AdamW:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(
        [
            {
                "params": [parameter for parameter in parameters if parameter.ndim >= 2],
                "weight_decay": settings.weight_decay,
            },
            {
                "params": [parameter for parameter in parameters if parameter.ndim < 2],
                "weight_decay": 0.0,
            },
        ],
        betas=BETAS,
        fused=True,
    )


def _steps(
    sequences: Sequence[TokenSequence], plan: Plan, seed: int, skip: int
) -> Iterator[Sequence[Sequence[int]]]:
    """The blocks of each step of the plan, from step `skip` on."""
    blocks = islice(
        chain.from_iterable(epochs(sequences, plan.block_length, seed)),
        skip * plan.blocks_per_step,
        plan.blocks,
    )
    while step := list(islice(blocks, plan.blocks_per_step)):
        yield step


def _step(
    model: "PreTrainedModel",
    optimizer: torch.optim.Optimizer,
    sequences: Sequence[TokenSequence],
    blocks: Sequence[Sequence[int]],
    rate: float,
    settings: TrainSettings,
) -> tuple[float, int]:
    """One update of the weights. Returns the loss per learned token, and the tokens seen: of all
    processes together, of which each computes every n-th block."""
    width = max(sum(len(sequences[index].token_ids) for index in block) for block in blocks)
    at_once = max(1, settings.micro_batch_tokens // width)
    num_learned = sum(sequences[index].num_learned for block in blocks for index in block)
    num_tokens = sum(len(sequences[index].token_ids) for block in blocks for index in block)
    total = 0.0
    own = blocks[rank() :: world_size()]
    for start in range(0, len(own), at_once):
        part = batch(sequences, own[start : start + at_once])
        with autocast(model.device):
            loss = summed_loss(*predict(model, part)) / num_learned
        torch.autograd.backward(loss)
        total += float(loss.detach())
    if world_size() > 1:
        total = _add_up(model, total)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
    if not (math.isfinite(total) and math.isfinite(float(norm))):
        raise TrainError(
            f"training diverged at learning rate {rate:.2g} (loss {total:.4g}, length of the "
            f"gradient {float(norm):.4g}); lower `train.learning_rate`, or look for broken rows"
        )
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return total, num_tokens


def _add_up(model: "PreTrainedModel", loss: float) -> float:
    """Gradients of all processes together, into each; returns the sum of their losses."""
    gradients = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
    losses = torch.tensor([loss], device=model.device)
    add_up([*gradients, losses])
    return float(losses)


def _measured(
    groups: Sequence[Sequence[TokenSequence]], max_tokens: int
) -> list[list[TokenSequence]]:
    """Of each group the first sequences, up to its share of `max_tokens`."""
    filled = [group for group in groups if group]
    measured = []
    for group in filled:
        left = max_tokens // len(filled)
        chosen: list[TokenSequence] = []
        for sequence in group:
            if chosen and left < len(sequence.token_ids):
                break
            chosen.append(sequence)
            left -= len(sequence.token_ids)
        measured.append(chosen)
    return measured


def _balanced_loss(model: "PreTrainedModel", groups: Sequence[Sequence[TokenSequence]]) -> float:
    return sum(mean_loss(row_losses(model, group)) for group in groups) / len(groups)


def _loss_of_all(
    model: "PreTrainedModel", groups: Sequence[Sequence[TokenSequence]], sizes: Sequence[int]
) -> float:
    """Per token of groups of these sizes, of which so many rows are measured."""
    losses = [mean_loss(row_losses(model, group)) for group in groups]
    return sum(loss * size for loss, size in zip(losses, sizes, strict=True)) / sum(sizes)


def _state(
    model: "PreTrainedModel", optimizer: torch.optim.Optimizer, best: dict[str, Tensor] | None
) -> State:
    return {
        "weights": checkpoints.weights_of(model),
        "optimizer": optimizer.state_dict(),
        "rng": torch.get_rng_state(),
        "best": best,
    }
