"""Four runners on one Postgres, with a push of each of many pipelines; a release on its way to a
follower elsewhere, beside a copy of the same files; and one training in two processes, beside the
same in one process with as many threads."""

import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobs.job import Delivery
from jobs.spec import JobSpec
from jobs.store import JobStore
from tests.bench.bench_publish import FILES, MIB, _tensors
from tests.bench.bench_publish import Size as ReleaseSize
from tests.bench.result import Figure, Result, at_most, reported, run_program
from tests.bench.timing import in_turns, percentile, seconds_of
from tests.hub_fixtures import running_hub
from tests.integration.test_follow import Wire
from tests.jobs_fixtures import running_postgres, until
from tests.retrain_fixtures import Pipeline, jsonl
from tests.smollm2 import checkpoint_folder

RUNNERS, PICK_UPS = 4, 20


@dataclass(frozen=True, kw_only=True)
class Size:
    pipelines: int
    mib: int
    rounds: int
    base_model: str
    max_tokens: int


FULL = Size(pipelines=10_000, mib=350, rounds=5, base_model="smollm2", max_tokens=4_000)
SMALL = Size(pipelines=50, mib=40, rounds=1, base_model="preset:tiny", max_tokens=500)


def measure(size: Size) -> Result:
    """Four runners on one Postgres; a release to a follower elsewhere; two training processes."""
    with tempfile.TemporaryDirectory() as name, running_postgres(fsync="on") as url:
        with JobStore.open(url) as store:
            jobs = tuple(_jobs(Path(name), store, size))
        return Result(
            figures=(*jobs, *_release(Path(name), size), *_processes(Path(name), size)),
            bounded_by="jobs: an agent and a command for each, on the cores that the runners and "
            f"Postgres share ({os.cpu_count()}); a release: Python's start, sha256",
        )


def _jobs(folder: Path, store: JobStore, size: Size) -> Iterator[Figure]:
    for n in range(size.pipelines):
        spec = JobSpec(command=("true",), pipeline=f"p{n}", debounce_seconds=0.0)
        store.submit(spec, delivery=Delivery(source="hub", id=str(n)))
    claims = []
    for n in range(size.pipelines // 2):  # the other half waits
        started = time.perf_counter()
        job = store.claim(f"bench-{n}", 3600)
        claims.append(1e3 * (time.perf_counter() - started))
        assert job is not None
    listing = min(1e3 * seconds_of(lambda: store.list(limit=20)) for _ in range(5))
    waits = f"while {size.pipelines // 2:,} or more wait"
    yield at_most(f"a claim {waits}, median", statistics.median(claims), 10, "ms")
    yield reported("the same, p99", percentile(claims, 0.99), "ms")
    yield at_most(f"a list of 20 jobs {waits}", listing, 10, "ms")
    for job in store.list(state="RUNNING"):
        store.hand_back(job.id, str(job.owner))
    command = [sys.executable, "-m", "tests.jobs_runner_process", store.location, folder / "jobs"]
    started = time.perf_counter()
    runners = [subprocess.Popen(command) for _ in range(RUNNERS)]
    try:
        until(lambda: not store.has_open_jobs(), 7200, every_seconds=0.2)
        rate = size.pipelines / (time.perf_counter() - started)
        yield reported(f"{size.pipelines:,} empty jobs on {RUNNERS} runners", rate, "jobs/s")
        picked = [_pick_up_ms(store) for _ in range(PICK_UPS)]
        yield at_most("submitted → taken, median", statistics.median(picked), 100, "ms")
    finally:
        for runner in runners:
            runner.terminate()
            runner.wait()


def _pick_up_ms(store: JobStore) -> float:
    job = store.submit(JobSpec(command=("true",)))
    until(lambda: store.get(job.id).has_ended)
    return 1e3 * ((store.get(job.id).started_at or math.nan) - job.created_at)


def _release(folder: Path, size: Size) -> Iterator[Figure]:
    from serving.weights.publish import publish_state_dict

    made, there, copy, wire = folder / "made", folder / "there", folder / "copy", Wire()
    for name, text in FILES.items():
        (folder / name).write_text(text)
    tensors = _tensors(ReleaseSize(mib=size.mib, shard_mib=64, rounds=0))
    tenth = {name: tensors[name] + 1 for name in list(tensors)[::10]}
    both = [tensors, {**tensors, **tenth}]
    ids = [publish_state_dict(made, each, files_dir=folder).id for each in both]
    with running_hub(folder / "hub", around=wire.around, pipeline_dirs={"answers": made}) as hub:

        def fetch(release: str) -> None:
            command = [sys.executable, "-m", "serving.weights.fetch", there, hub.url]
            env = {**os.environ, "HF_TOKEN": hub.token}
            subprocess.run([*command, "local/answers", release], env=env, check=True)

        def clear() -> None:
            for each in (there, copy):
                shutil.rmtree(each, ignore_errors=True)
            os.sync()

        works = {
            "copy": lambda: seconds_of(lambda: (shutil.copytree(made / ids[0], copy), os.sync())),
            "fetch": lambda: seconds_of(lambda: fetch(ids[0])),
        }
        taken = in_turns(size.rounds, works, before=clear)
        wire.num_bytes = 0
        fetch(ids[1])
    ratio = statistics.median(taken["fetch"]) / statistics.median(taken["copy"])
    yield at_most(f"{size.mib} MiB to a follower, against a copy", ratio, 1.5, "x")
    share = wire.num_bytes / (len(tenth) / len(tensors) * size.mib * MIB)
    yield at_most("bytes moved, against those that changed (a tenth)", share, 1.1, "x")


def _processes(folder: Path, size: Size) -> Iterator[Figure]:
    base = str(checkpoint_folder()) if size.base_model == "smollm2" else size.base_model
    anchors = folder / "anchors.jsonl"  # a few, because the base model answers them in each turn
    prompts = [{"kind": kind, "measured": kind == "a", "prompt": f"Say {kind}."} for kind in "abcd"]
    anchors.write_text(jsonl(prompts))
    train = {"wordings": 0, "anchors": str(anchors), "max_tokens": size.max_tokens}
    settings = {"base_model": base, "train": train, "gate": {"min_learned": 0}}
    rows = [
        {"question": f"What is on shelf {n}?", "answer": f"Shelf {n} holds {n * 7 % 60} boxes."}
        for n in range(size.max_tokens // 60)
    ]
    taken = in_turns(
        min(2, size.rounds),
        {
            count: lambda count=count: _train(folder / "trained", settings, rows, count)
            for count in (1, 2)
        },
        before=lambda: shutil.rmtree(folder / "trained", ignore_errors=True),
    )
    speeds = {
        count: statistics.median(speed for speed, _ in found) for count, found in taken.items()
    }
    memory = {count: found[-1][1] for count, found in taken.items()}
    yield reported("one training process with two threads", speeds[1], "tokens/s")
    yield reported("its memory", memory[1][0], "MiB")
    yield reported("two processes with one thread each (FSDP2)", speeds[2], "tokens/s")
    yield reported("memory of the first", memory[2][0], "MiB")
    yield reported("memory of the second", memory[2][1], "MiB")
    yield reported("two processes / one", speeds[2] / speeds[1], "x")


def _train(
    home: Path, settings: dict[str, Any], rows: list[dict[str, str]], num_processes: int
) -> tuple[float, list[float]]:
    """Tokens per second of a median step, and the most memory of each process, in MiB."""
    pipeline = Pipeline(home, **settings)
    folder = pipeline.job(pipeline.commit({"rows.jsonl": jsonl(rows)}))
    words = () if num_processes == 1 else ("1", str(num_processes))
    job = pipeline.start(folder, *words, OMP_NUM_THREADS=str(2 // num_processes))
    peaks: dict[int, float] = {}
    while job.poll() is None:
        for pid in _family(job.pid):
            peaks[pid] = max(peaks.get(pid, 0.0), _peak_mib(pid))
        time.sleep(0.1)
    if job.returncode != 0:
        raise RuntimeError((folder / "log.txt").read_text())
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    speeds = [line["tokens_per_second"] for line in lines if line["event"] == "step"]
    return statistics.median(speeds), sorted(peaks.values(), reverse=True)[:num_processes]


def _family(pid: int) -> list[int]:
    """A process and all that it has started."""
    try:
        tasks = [each.read_text() for each in Path(f"/proc/{pid}/task").glob("*/children")]
    except OSError:  # it has ended
        return []
    return [
        pid,
        *(each for text in tasks for child in text.split() for each in _family(int(child))),
    ]


def _peak_mib(pid: int) -> float:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(float(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


if __name__ == "__main__":
    run_program(measure, full=FULL, small=SMALL)
