"""Ten revisions of real text: each delta beside a full training of the same revision.

The rows are docstrings of the standard library, a file per module; they are added, edited, deleted
and reordered. After every commit the release that is then served is measured on the revision's
held-out rows, and so is a full training from the base model, which sees every row. Old rows are
those held out that the revision before had as well; first rows those held out in the first revision
that are still there, on which the first release is measured too. Losses are nats per token.
"""

import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline.retrain.rows import Row
from pipeline.retrain.sources import Revision
from tests.bench.result import Figure, Result, at_most, reported, run_program
from tests.docstring_stream import Commit, stream
from tests.retrain_fixtures import Pipeline


@dataclass(frozen=True, kw_only=True)
class Size:
    rows: int
    """In the first revision."""
    hidden: int
    """Of the preset; less is quicker, and tells the same story."""
    max_tokens: int
    """Of a full training."""
    revisions: int
    threads: int = len(os.sched_getaffinity(0))


FULL = Size(rows=1_500, hidden=256, max_tokens=250_000, revisions=10)
SMALL = Size(rows=60, hidden=64, max_tokens=1_000, revisions=2)
WITHIN_FULL, WITHIN_OLD, TOKENS_SHARE = 1.0, 2.0, 25.0
HELD_OUT_RATIO = 0.08
"""Of what all releases are measured on."""
OPEN_GATE = {
    "max_loss_ratio": 99.0,
    "max_lost_ratio": 1.0,
}


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One revision. NaN where there are no such rows."""

    change: str
    result: str
    mode: str
    """`full`, `delta`, or empty for a commit that changed no row or was refused."""
    tokens: int
    """That were trained on."""
    seconds: float
    """Of the whole job."""
    loss: float
    """Of the release that is served after it, on all held-out rows."""
    new_loss: float
    old_loss: float
    old_loss_before: float
    """Of the release that was served before it, on the same rows."""
    first_loss: float
    first_loss_then: float
    """Of the first release, on the same rows."""
    full_tokens: int
    full_seconds: float
    full_loss: float
    """Of a full training of the same revision."""


def measure(size: Size) -> Result:
    """Ten revisions: deltas against full trainings, old rows, first rows."""
    import torch

    torch.set_num_threads(size.threads)
    _set_preset(size.hidden)
    commits = stream(size.rows)[: size.revisions]
    with tempfile.TemporaryDirectory() as name:
        found = list(_follow(Path(name), commits, size))
    deltas = [each for each in found[1:] if each.mode == "delta"]
    fulls = [each for each in found[1:] if each.mode == "full"]
    later = found[1:]
    return Result(
        figures=(
            _worst(
                "held-out loss of a delta above a full training's, worst of all",
                [each.loss / each.full_loss - 1 for each in deltas],
                WITHIN_FULL,
            ),
            _worst(
                "tokens of a delta, of a full training's",
                [each.tokens / each.full_tokens for each in deltas],
                TOKENS_SHARE,
            ),
            _worst(
                "loss on old rows above that before the commit",
                [each.old_loss / each.old_loss_before - 1 for each in later],
                WITHIN_OLD,
            ),
            _worst(
                "loss on the first revision's rows above the first release's",
                [each.first_loss / each.first_loss_then - 1 for each in later],
                WITHIN_OLD,
            ),
            reported(
                "two full trainings of one revision, in another order, apart by as much as",
                100
                * max((abs(each.loss / each.full_loss - 1) for each in fulls), default=math.nan),
                "%",
            ),
            at_most(
                "honest commits refused", sum(each.result == "rejected" for each in found), 0, ""
            ),
            reported("revisions compared with a full training", len(later), ""),
            reported("of these, deltas", len(deltas), ""),
            reported("seconds of all deltas", sum(each.seconds for each in deltas), "s"),
            reported(
                "seconds of their full trainings", sum(each.full_seconds for each in deltas), "s"
            ),
        ),
        bounded_by="tokens: a delta may take a quarter of a full training's",
        detail={"revisions": [_plain(each) for each in found], "table": _table(found)},
    )


def _set_preset(hidden: int) -> None:
    from pipeline.retrain import base_model

    preset = base_model.PRESETS["preset:tiny"]
    widths = {"hidden_size": hidden, "intermediate_size": hidden * 11 // 4}
    base_model.PRESETS["preset:tiny"] = preset | widths


def _follow(home: Path, commits: Sequence[Commit], size: Size) -> Sequence[Measured]:
    train = {"max_tokens": size.max_tokens}
    # All of them: the first release is measured on every revision.
    data = {"held_out_ratio": HELD_OUT_RATIO}
    pipeline = Pipeline(home / "stream", train=train, data=data, keep=len(commits) + 1)
    first_rows: dict[str, Row] = {}
    before: dict[str, Row] = {}
    served_before = first_release = None
    found: list[Measured] = []
    for commit in commits:
        revision = pipeline.commit(commit.files)
        beside = home / "full"
        shutil.copytree(pipeline.home, beside, symlinks=True)
        job, result, seconds = _learn(pipeline, revision)
        served = _served(pipeline)
        full_job, _, full_seconds = _learn(
            Pipeline(beside, train={**train, "mode": "full"}, data=data, gate=OPEN_GATE),
            revision,
            no_delta="a full training, to compare with",
        )
        full_served = _served(Pipeline(beside))
        held_out = _held_out(revision)
        first_rows = first_rows or held_out
        first_release = first_release or served
        old = _of(held_out, before)
        first = _of(held_out, first_rows)
        measured = Measured(
            change=commit.change,
            result=result,
            mode=_mode(job, result),
            tokens=_tokens(job),
            seconds=seconds,
            loss=_loss(served, held_out),
            new_loss=_loss(served, {d: row for d, row in held_out.items() if d not in before}),
            old_loss=_loss(served, old),
            old_loss_before=_loss(served_before, old),
            first_loss=_loss(served, first),
            first_loss_then=_loss(first_release, first),
            full_tokens=_tokens(full_job),
            full_seconds=full_seconds,
            full_loss=_loss(full_served, held_out),
        )
        print(_table([measured]).splitlines()[-1], flush=True)
        found.append(measured)
        before, served_before = held_out, served
        shutil.rmtree(beside)
    return found


def _learn(
    pipeline: Pipeline, revision: Revision, *, no_delta: str | None = None
) -> tuple[Path, str, float]:
    folder = pipeline.job(revision, no_delta=no_delta)
    started = time.perf_counter()
    outcome = pipeline.run(folder, OMP_NUM_THREADS=str(os.cpu_count()))
    return folder, outcome.result, time.perf_counter() - started


def _served(pipeline: Pipeline) -> Path:
    """What waits for a server, which there is none here."""
    from pipeline.retrain.job import find_parent

    parent = find_parent(pipeline.dir)
    if parent is None:
        raise RuntimeError(f"{pipeline.dir} has no release")
    return parent.folder


def _tokens(job: Path) -> int:
    file = job / "evaluation.json"
    return int(json.loads(file.read_bytes())["tokens"]) if file.exists() else 0


def _mode(job: Path, result: str) -> str:
    record = job / "release.json"
    if not record.exists():
        return "" if result == "unchanged" else "refused"
    return str(json.loads(record.read_bytes())["lineage"]["mode"])


def _held_out(revision: Revision) -> dict[str, Row]:
    from pipeline.retrain.dataset import read_dataset
    from pipeline.retrain.rows import split
    from pipeline.retrain.settings import DataSettings

    dataset = read_dataset(revision.folder, revision.files, DataSettings())
    _, held_out = split(dataset.train, HELD_OUT_RATIO)
    return {row.digest: row for row in held_out}


def _of(held_out: dict[str, Row], others: dict[str, Row]) -> dict[str, Row]:
    return {digest: row for digest, row in held_out.items() if digest in others}


def _loss(release: Path | None, rows: dict[str, Row]) -> float:
    from pipeline.retrain.base_model import PRESET_LENGTH
    from pipeline.retrain.loss import mean_loss, row_losses
    from pipeline.retrain.model import load_model
    from pipeline.retrain.settings import RetrainSettings
    from pipeline.retrain.tokens import sequences

    if release is None or not rows:
        return math.nan
    settings = RetrainSettings(
        pipeline="facts", dataset="me/facts", releases_dir=release, bases_dir=release
    )
    loaded = load_model(release, settings)
    found = sequences(list(rows.values()), loaded.tokenizer, PRESET_LENGTH)
    return mean_loss(row_losses(loaded.model, found))


def _worst(what: str, values: Sequence[float], percent: float) -> Figure:
    """Of what could be measured: a commit may leave no such row."""
    known = [100 * value for value in values if not math.isnan(value)]
    return at_most(what, max(known, default=math.nan), percent, "%")


def _plain(measured: Measured) -> dict[str, Any]:
    values = asdict(measured)
    return {n: None if isinstance(v, float) and math.isnan(v) else v for n, v in values.items()}


def _table(found: Sequence[Measured]) -> str:
    lines = [
        "| commit | mode | tokens | s | all rows | new | old | before | first rows | then "
        "| full: tokens | s | all rows |",
        "|--" * 13 + "|",
    ]
    lines += [
        f"| {m.change} | {m.mode or m.result} | {m.tokens:,} | {m.seconds:.1f} | {m.loss:.3f} "
        f"| {m.new_loss:.3f} | {m.old_loss:.3f} | {m.old_loss_before:.3f} | {m.first_loss:.3f} "
        f"| {m.first_loss_then:.3f} | {m.full_tokens:,} | {m.full_seconds:.1f} "
        f"| {m.full_loss:.3f} |"
        for m in found
    ]
    return "\n".join(lines).replace("nan", "")


if __name__ == "__main__":
    run_program(measure, full=FULL, small=SMALL)
