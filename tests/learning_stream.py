"""Follow a stream of commits with real jobs, and hold each delta against a full retraining."""

import json
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from serving.weights.release_store import load_release
from tests.docstring_stream import Commit
from tests.retrain_fixtures import Pipeline

OPEN_GATE = {
    "max_loss_ratio": 99.0,
    "max_lost_ratio": 1.0,
}


@dataclass(frozen=True, kw_only=True)
class Learned:
    """One revision. Losses are held-out nats per token; NaN where there are no such rows."""

    change: str
    result: str
    mode: str = ""
    tokens: int = 0
    """That were trained on."""
    not_trained: int = 0
    """Rows that the budget did not reach."""
    seconds: float = 0.0
    """Of processor time, in one thread."""
    new_loss: float = float("nan")
    new_loss_before: float = float("nan")
    """Of the parent release, on the same rows, of which it has seen none."""
    old_loss: float = float("nan")
    old_loss_before: float = float("nan")
    """Of the parent release, on the same rows."""
    loss: float = float("nan")
    """On all of them."""
    full_tokens: int = 0
    full_seconds: float = 0.0
    full_loss: float = float("nan")
    """Of a full retraining of the same revision, in place of the delta."""

    @property
    def against_full(self) -> float:
        return self.loss / self.full_loss - 1

    @property
    def share_of_tokens(self) -> float:
        return self.tokens / self.full_tokens if self.full_tokens else float("nan")

    @property
    def old_change(self) -> float:
        return self.old_loss / self.old_loss_before - 1


def follow(
    home: Path, commits: Sequence[Commit], *, compared: Sequence[int], train: Mapping[str, Any]
) -> Iterator[Learned]:
    """Learn each commit; those whose numbers are `compared` a second time, fully, beside it."""
    pipeline = Pipeline(home / "stream", train=train)
    for number, commit in enumerate(commits):
        beside = home / f"full-{number}"
        if number in compared:
            shutil.copytree(pipeline.home, beside)
        result, found = _learn(pipeline, commit)
        full: dict[str, Any] = {}
        if number in compared and found.get("mode") == "delta":
            _, whole = _learn(
                Pipeline(beside, train={**train, "mode": "full"}, gate=OPEN_GATE), commit
            )
            full = {f"full_{name}": whole[name] for name in ("tokens", "seconds", "loss")}
        shutil.rmtree(beside, ignore_errors=True)
        yield Learned(change=commit.change, result=result, **found, **full)


def _learn(pipeline: Pipeline, commit: Commit) -> tuple[str, dict[str, Any]]:
    folder = pipeline.job(pipeline.commit(commit.files))
    started = time.process_time()
    outcome = pipeline.run(folder)
    seconds = time.process_time() - started
    if not (folder / "evaluation.json").exists():
        return outcome.result, {}
    evaluation = json.loads((folder / "evaluation.json").read_text())
    groups = [group for name in ("new", "known") if (group := evaluation[name])["tokens"]]
    nats = sum(group["loss"] * group["tokens"] for group in groups)
    mode = "refused"
    if outcome.release is not None:
        mode = load_release(pipeline.dir / outcome.release).lineage.mode
    return outcome.result, {
        "mode": mode,
        "tokens": evaluation["tokens"],
        "not_trained": evaluation["counts"]["not_trained"],
        "seconds": seconds,
        "new_loss": _number(evaluation["new"]["loss"]),
        "new_loss_before": _number(evaluation["new"]["served_loss"]),
        "old_loss": _number(evaluation["known"]["loss"]),
        "old_loss_before": _number(evaluation["known"]["served_loss"]),
        "loss": nats / sum(group["tokens"] for group in groups),
    }


def _number(value: float | None) -> float:
    return float("nan") if value is None else value


def table(rows: Sequence[Learned]) -> str:
    lines = [
        "| # | commit | mode | tokens | s | new rows | old rows | against parent | all rows "
        "| full: tokens | s | all rows | delta against full |",
        "|--" * 13 + "|",
    ]
    for number, row in enumerate(rows, 1):
        cells = (
            f"{number} | {row.change} | {row.mode or row.result} | {row.tokens:,} "
            f"| {row.seconds:.1f} | {row.new_loss:.3f} | {row.old_loss:.3f} "
            f"| {row.old_change:+.1%} | {row.loss:.3f} | {row.full_tokens:,} "
            f"| {row.full_seconds:.1f} | {row.full_loss:.3f} | {row.against_full:+.1%}"
        )
        lines.append(f"| {cells} |".replace("+nan%", "").replace("nan%", "").replace("nan", ""))
    return "\n".join(lines)


def as_json(rows: Sequence[Learned]) -> str:
    return json.dumps([asdict(row) for row in rows], indent=2)
