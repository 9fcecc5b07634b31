"""Trains a small network, in this process or in those of torchrun: `FOLDER RANK_OF_LORA [STEPS]`.
Each process writes how many weights it had during the training, and ends in step STEPS."""

import os
import sys
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from typing import Any

import torch

from pipeline.retrain import lowrank, processes
from pipeline.retrain import train as loop
from pipeline.retrain.job import MetricsWriter
from pipeline.retrain.loss import AnchorTarget
from pipeline.retrain.settings import TrainSettings
from tests.training_fixtures import VOCABULARY, make_model, plan_of, questions, rows

folder, rank = Path(sys.argv[1]), int(sys.argv[2])
lowrank.NOISE = 0.0  # it would differ, because each process draws its own


steps = count(2)


class Optimizer(torch.optim.AdamW):
    def step(self, closure: Any = None) -> None:
        parameters = [each for group in self.param_groups for each in group["params"]]
        local = [getattr(each, "_local_tensor", each) for each in parameters]
        number = sum(each.numel() for each in local)
        Path(folder, f"parameters-{processes.rank()}").write_text(str(number))
        if len(sys.argv) > 3 and self.state and next(steps) == int(sys.argv[3]):
            os._exit(3)
        super().step(closure)


torch.optim.AdamW = Optimizer  # type: ignore[misc]


def train() -> int:
    model = make_model()
    answer = rows(1, length=9)[0]
    ids = torch.arange(8).repeat(answer.num_learned, 1)
    plan = plan_of(
        # One row is left for the second of two processes, or none.
        [*rows(5, 6), *questions(7)],
        counted=True,
        anchors=(AnchorTarget(answer, ids, torch.full(ids.shape, 1 / VOCABULARY).log()),),
        anchor_ratio=0.5,
        max_tokens=1_500,
        learning_rate=3e-3,
    )
    settings = TrainSettings(micro_batch_tokens=128, checkpoint_seconds=1e-9)
    metrics = MetricsWriter(folder / "metrics.jsonl")
    with lowrank.low_rank(model, rank, 0, rows(5, 6)) if rank else nullcontext():
        loop.train(model, plan, settings, job_dir=folder, mode="full", metrics=metrics)
    return 0


torch.set_num_threads(1)
if "TORCHELASTIC_RUN_ID" in os.environ:
    processes.run_part(train, loop.help_to_train)
sys.exit(train())
