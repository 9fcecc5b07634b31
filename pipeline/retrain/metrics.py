"""`metrics.jsonl`: the stages and the losses of a job while it runs, one JSON object per line."""

import json
import time
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

Stage = Literal["snapshot", "data", "measure", "train", "evaluate", "export", "promote"]
Event = Literal["start", "end", "step", "evaluation", "average", "measured", "answered"]


class Metric(BaseModel):
    """One line. A field that its event does not use is None, and is not written."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    time: float
    """Seconds since the epoch."""
    stage: Stage
    event: Event
    step: int | None = None
    """Updates of the weights so far."""
    steps: int | None = None
    """Updates that the token budget allows. Training ends earlier if all rows are learned
    before."""
    right: int | None = None
    rows: int | None = None
    """For an evaluation during training: the rows that were measured. `right` counts those of them
    whose answer the model gives. In the event `measured`: all rows that the stage measures,
    together with the base model's answers. In the event `answered`: the everyday prompts that the
    base model answers, once for all its jobs."""
    measured: int | None = None
    """How many of `rows` the stage has measured so far, or the base model has answered."""
    loss: float | None = None
    """Nats per predicted token. For a step, the loss on the rows of the step. For an evaluation or
    an average, the loss on the rows that were measured."""
    share: float | None = None
    """Used if the trained weights are averaged with the weights before the training: the share of
    the trained weights in this average."""
    learning_rate: float | None = None
    tokens: int | None = None
    """Tokens trained on so far, without padding."""
    tokens_per_second: float | None = None
    """The speed of this step."""
    seconds: float | None = None
    """How long the stage took. Only in the event `end`."""


class MetricsWriter:
    """Appends lines to `metrics.jsonl`. A restarted job appends to the file of its first start."""

    def __init__(self, path: Path) -> None:
        self._path = path
        if path.exists():
            # A killed attempt may have left a part of a line. End it, because the first line of
            # this attempt would be lost with it. Readers skip an empty line.
            self._append("\n")

    def write(self, stage: Stage, event: Event, **values: float | int | None) -> None:
        line = {"time": time.time(), "stage": stage, "event": event, **values}
        self._append(json.dumps(line) + "\n")

    def _append(self, text: str) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(text)


def read_metrics(path: Path, offset: int = 0) -> tuple[tuple[Metric, ...], int]:
    """The complete lines from byte `offset` on, and the offset for the next call.

    The last line is left for the next call if it is still being written. A line that cannot be
    parsed is skipped. A missing file counts as empty.
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
