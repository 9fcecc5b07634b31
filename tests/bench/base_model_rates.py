"""The table of docs/training.md that compares ways to train a pretrained model.

    python -m tests.bench.base_model_rates

Each line trains SmolLM2-135M-Instruct once on 60 unrelated facts, by the product's own job: all
weights, ordinary LoRA (all linear layers, both factors trained; only here, as a patch) and the
default, each with and without anchors, over learning rates. The lines are printed as they come.
"""

import argparse
import math
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from transformers import PreTrainedModel

from pipeline.retrain import learning
from pipeline.retrain.lowrank import LowRank
from pipeline.retrain.plan import TrainingPlan
from tests.bench.bench_learning import _agreement_elsewhere, _counted
from tests.retrain_fixtures import Pipeline, jsonl
from tests.smollm2 import checkpoint_folder
from tests.unrelated_facts import as_chat, paraphrased, unrelated_facts

FACTS = 60
OPEN_GATE = {"max_base_drift": 1.0, "min_learned": 0.0}
WAYS: dict[str, tuple[int | None, tuple[float, ...]]] = {
    "all weights": (0, (5e-5, 1e-4)),
    "ordinary LoRA, rank 32": (32, (5e-4, 2e-3)),
    "the default (rank 128, directions chosen)": (None, (5e-4, 2e-3)),
}
"""By name: the setting `lora_rank`, and the learning rates."""


class OrdinaryLowRank(LowRank):
    """As in https://arxiv.org/abs/2106.09685: `first` is random and trained too."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__(layer, torch.empty(rank, layer.in_features))
        del self.first
        self.first = nn.Parameter(torch.empty(rank, layer.in_features))
        nn.init.kaiming_uniform_(self.first, a=math.sqrt(5))


@contextmanager
def ordinary_low_rank(model: PreTrainedModel, plan: TrainingPlan, rank: int) -> Iterator[None]:
    """In place of `pipeline.retrain.lowrank.low_rank`: all linear layers but the output layer."""
    names = [
        name
        for name, module in model.named_modules()
        if type(module) is nn.Linear and module is not model.get_output_embeddings()
    ]
    model.requires_grad_(False)
    torch.manual_seed(0)
    for name in names:
        model.set_submodule(name, OrdinaryLowRank(model.get_submodule(name), rank))
    yield
    for name in names:
        wrapped = model.get_submodule(name)
        assert isinstance(wrapped, LowRank)
        model.set_submodule(name, wrapped.merge())
    model.requires_grad_(True)


@contextmanager
def training_as(way: str) -> Iterator[None]:
    if not way.startswith("ordinary"):
        yield
        return
    with (
        patch.object(learning, "low_rank", ordinary_low_rank),
        patch.object(learning, "frozen_trunk", lambda model, plan, folder: nullcontext(plan)),
    ):
        yield


def line(home: Path, base: Path, way: str, rate: float, anchor_ratio: float, **more: object) -> str:
    facts = unrelated_facts(FACTS)
    train: dict[str, Any] = {"learning_rate": rate, "anchor_ratio": anchor_ratio, **more}
    rank = WAYS[way][0]
    if rank is not None:
        train["lora_rank"] = rank
    pipeline = Pipeline(
        home / "pipeline",
        base_model=str(base),
        bases_dir=str(home / "bases"),
        train=train,
        gate=OPEN_GATE,
    )
    job = pipeline.job(pipeline.commit({"rows.jsonl": jsonl(as_chat(facts))}))
    started = time.monotonic()
    with training_as(way):
        outcome = pipeline.run(job, OMP_NUM_THREADS=str(len(os.sched_getaffinity(0))))
    seconds = time.monotonic() - started
    counts = outcome.counts
    assert counts is not None, outcome
    others = as_chat([(paraphrased(question), answer) for question, answer in facts])
    paraphrases = len(_counted(pipeline, outcome, others))
    elsewhere = _agreement_elsewhere(base, pipeline, outcome)
    shutil.rmtree(pipeline.home)
    return (
        f"| {way} | {rate:g} | {'yes' if anchor_ratio else 'none'} | {counts.learned} "
        f"| {paraphrases} | {100 * (counts.base_agreement or 0):.0f} % | {100 * elsewhere:.0f} % "
        f"| {seconds:.0f} s |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.parse_args()
    base = checkpoint_folder()
    print(
        "| what is trained | learning rate | anchors | learned | paraphrases | base | other | s |"
    )
    print("|--" * 8 + "|", flush=True)
    with tempfile.TemporaryDirectory() as name:
        # The base model answers the anchors once. This job does that, and is not measured.
        line(Path(name), base, "all weights", 1e-6, 0.0, max_tokens=1_000)
        for way, (_, rates) in WAYS.items():
            for rate in rates:
                for anchor_ratio in (0.0, 1.0):
                    print(line(Path(name), base, way, rate, anchor_ratio), flush=True)


if __name__ == "__main__":
    main()
