"""Four runners on one Postgres, with a push of each of many pipelines; and a release on its way to
a follower elsewhere, beside a copy of the same files."""

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

RUNNERS, PICK_UPS = 4, 20


@dataclass(frozen=True, kw_only=True)
class Size:
    pipelines: int
    mib: int
    rounds: int


FULL = Size(pipelines=10_000, mib=350, rounds=5)
SMALL = Size(pipelines=50, mib=40, rounds=1)


def measure(size: Size) -> Result:
    """Four runners on one Postgres; a release to a follower elsewhere."""
    with tempfile.TemporaryDirectory() as name, running_postgres(fsync="on") as url:
        with JobStore.open(url) as store:
            jobs = tuple(_jobs(Path(name), store, size))
        return Result(
            figures=(*jobs, *_release(Path(name), size)),
            bounded_by="jobs: an agent and a command for each, on the cores that the runners and "
            f"Postgres share ({os.cpu_count()}); a release: sha256",
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
        store.release(job.id, str(job.owner))
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


if __name__ == "__main__":
    run_program(measure, full=FULL, small=SMALL)
