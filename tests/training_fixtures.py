"""A network of a few thousand weights, rows of numbers, and plans: the training loop alone."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers import LlamaConfig, LlamaForCausalLM

from pipeline.retrain.plan import TrainingPlan
from pipeline.retrain.tokens import TokenSequence

VOCABULARY = 40


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def make_model(**config: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            **config,
        )
    )
    return model.eval()


def rows(count: int, length: int = 30) -> list[TokenSequence]:
    """Rows that a model can learn, of which all but the first token is learned."""
    return [
        TokenSequence(
            tuple((row * 7 + place) % VOCABULARY for place in range(length)),
            (False, *(True,) * (length - 1)),
            row,
        )
        for row in range(count)
    ]


def questions(count: int, answers: int = 0) -> list[TokenSequence]:
    """Rows of two tokens of question and two of answer; `answers` picks other ones."""
    return [
        TokenSequence(
            (row % 20, 20 + row // 20, (row * 3 + answers) % 38, 39),
            (False, False, True, True),
            row,
        )
        for row in range(count)
    ]


def num_tokens(plan: TrainingPlan, indices: Iterable[int]) -> int:
    return sum(len(plan.sequences[index].token_ids) for index in indices)


def plan_of(
    learned: Sequence[TokenSequence],
    *,
    counted: bool = False,
    replayed: Sequence[TokenSequence] = (),
    tokens_per_step: int = 64,
    **fields: Any,
) -> TrainingPlan:
    """A plan that learns these. counted: they are rows with an answer, which end the training."""
    found = [*learned, *replayed]
    first = len(learned)
    told: dict[str, Any] = {
        "sequences": found,
        "learned": range(first),
        "counted": frozenset(range(first)) if counted else frozenset(),
        "replayed": range(first, len(found)),
        "anchors": (),
        "checked": list(range(len(found))) if counted else [],
        "judged": (),
        "learning_rate": 1e-3,
        "max_tokens": 4 * sum(len(each.token_ids) for each in learned),
        "step_tokens": tokens_per_step,
        "replay_ratio": 3.0 if replayed else 0.0,
        "anchor_ratio": 0.0,
        **fields,
    }
    told.setdefault("warm_up_steps", math.ceil(0.05 * told["max_tokens"] / tokens_per_step))
    return TrainingPlan(**told)


def stored_weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Of all processes that wrote a part of it."""
    found = checkpoint.with_suffix(".pt")
    dcp_to_torch_save(checkpoint, found)
    weights: dict[str, torch.Tensor] = torch.load(found)["weights"]
    return weights
