"""Peak memory of a whole training job beside a Trainer's that does the same.

Both are commands of their own from imports to the saved weights: `python -m pipeline.retrain` of a
first commit (snapshot at hand, train, evaluate, export), and a script around `transformers.Trainer`
that loads the same rows and the same base model, trains as many epochs, evaluates and saves.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from jobs.outcome import JobOutcome
from pipeline.retrain.snapshot import Revision
from tests.bench.result import Result, at_most, reported, run_program
from tests.bench.timing import in_turns
from tests.docstring_stream import docstrings
from tests.retrain_fixtures import Pipeline


@dataclass(frozen=True, kw_only=True)
class Size:
    rows: int
    epochs: float
    rounds: int


FULL = Size(rows=1_500, epochs=1.0, rounds=3)
SMALL = Size(rows=40, epochs=1.0, rounds=1)
MIB = 2**20


def measure(size: Size) -> Result:
    """Peak resident memory of a training job, against the Trainer's."""
    texts = docstrings(size.rows)
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        train = {"max_epochs": size.epochs, "max_tokens": 1 << 40}
        pipeline = Pipeline(home / "ours", train=train)
        content = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        revision = pipeline.commit({"rows.jsonl": content})
        # Makes the base model, which both then start from.
        _ours(pipeline, revision)
        base = pipeline.home / "bases" / "facts" / "tiny"

        def ours() -> int:
            return _ours(pipeline, revision)

        def theirs() -> int:
            out = home / "theirs"
            rows = str(revision.folder / "rows.jsonl")
            command = [sys.executable, "-m", "tests.bench.trainer_job", str(base), rows]
            return _peak_bytes([*command, str(out), str(size.epochs)], dict(os.environ), out)

        found = in_turns(size.rounds, {"ours": ours, "trainer": theirs})
    least = {name: min(peaks) for name, peaks in found.items()}
    return Result(
        figures=(
            at_most("ours / the Trainer's", least["ours"] / least["trainer"], 1.0, "x"),
            reported("ours, peak", least["ours"] / MIB, "MiB"),
            reported("the Trainer's, peak", least["trainer"] / MIB, "MiB"),
        ),
        bounded_by="imports of torch and transformers, then the activations of a micro-batch "
        "(`micro_batch_tokens`) and the copy of the best weights",
        detail={name: list(peaks) for name, peaks in found.items()},
    )


def _ours(pipeline: Pipeline, revision: Revision) -> int:
    # A first commit each time: of a second one nothing would be new.
    shutil.rmtree(pipeline.dir, ignore_errors=True)
    folder = pipeline.job(revision)
    command = [sys.executable, "-m", "pipeline.retrain"]
    peak = _peak_bytes(command, pipeline.environ(folder), folder)
    outcome = JobOutcome.model_validate_json((folder / "outcome.json").read_bytes())
    if outcome.result != "published" or not (pipeline.dir / str(outcome.release)).is_dir():
        raise RuntimeError(f"the job ended as {outcome}")
    return peak


def _peak_bytes(command: list[str], env: dict[str, str], folder: Path) -> int:
    """Of the command's process, or of the largest one that it waited for."""
    folder.mkdir(parents=True, exist_ok=True)
    offline = {**env, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(os.cpu_count())}
    with (folder / "log.txt").open("ab") as log:
        process = subprocess.Popen(command, env=offline, stdout=log, stderr=log)
        # Not `process.wait`: only wait4 tells of this child alone.
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{command}: {(folder / 'log.txt').read_text()[-2000:]}")
    return usage.ru_maxrss * 1024


if __name__ == "__main__":
    run_program(measure, full=FULL, small=SMALL)
