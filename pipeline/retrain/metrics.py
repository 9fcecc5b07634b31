"""`metrics.jsonl`: what a running job says about itself, one JSON object per line."""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, get_args

from pydantic import BaseModel, ConfigDict

from pipeline.retrain.reporters import Report

Stage = Literal["snapshot", "data", "measure", "train", "evaluate", "export", "promote"]
STAGES: tuple[Stage, ...] = get_args(Stage)
Event = Literal["start", "end", "step", "evaluation", "average"]


class Metric(BaseModel):
    """One line. Fields that do not belong to its event are None and are not written."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    time: float
    """Seconds since the epoch."""
    stage: Stage
    event: Event
    step: int | None = None
    """Updates of the weights so far."""
    steps: int | None = None
    """Updates that the budget allows; training ends before where all rows are learned."""
    right: int | None = None
    rows: int | None = None
    """Of the rows measured during training, how many the model says."""
    loss: float | None = None
    """Nats per predicted token: of the step's own rows, or, for an evaluation and an average, held
    out."""
    share: float | None = None
    """Of the trained weights, in an average with those that the training started from."""
    learning_rate: float | None = None
    tokens: int | None = None
    """Trained on so far, without padding."""
    tokens_per_second: float | None = None
    """Since the step before."""
    seconds: float | None = None
    """What the stage took, at its end."""


class MetricsWriter:
    """Appends to `metrics.jsonl`. A restarted job goes on in the same file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._reports: tuple[Report, ...] = ()
        self._end_torn_line()

    def write(
        self,
        stage: Stage,
        event: Event,
        **values: float | int | None,
    ) -> None:
        line = {"time": time.time(), "stage": stage, "event": event, **values}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        step = values.get("step")
        if isinstance(step, int) and self._reports:
            prefix = "held_out" if event == "evaluation" else stage
            reported = {
                f"{prefix}/{name}": float(value)
                for name, value in values.items()
                if value is not None and name not in ("step", "steps")
            }
            for report in self._reports:
                report(reported, step)

    @contextmanager
    def reporting_to(self, reports: tuple[Report, ...]) -> Iterator[None]:
        """Inside, values that belong to a step are told to these too."""
        self._reports = reports
        yield
        self._reports = ()

    def _end_torn_line(self) -> None:
        """A job that was killed in the middle of a line leaves it to be skipped, alone."""
        if not self._path.exists() or self._path.stat().st_size == 0:
            return
        with self._path.open("rb+") as file:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")


def read_metrics(path: Path, offset: int = 0) -> tuple[tuple[Metric, ...], int]:
    """The whole lines from byte `offset` on, and the offset to ask from next.

    A line still being written is left for the next call; a torn one is skipped. A file that is not
    there yet holds nothing.
    """
    try:
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read()
    except FileNotFoundError:
        return (), offset
    whole = data[: data.rfind(b"\n") + 1]
    metrics = []
    for line in whole.splitlines():
        try:
            metrics.append(Metric.model_validate_json(line))
        except ValueError:
            continue
    return tuple(metrics), offset + len(whole)
