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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from starlette.types import ASGIApp, Receive, Scope, Send

from jobs.job import Delivery, Job
from jobs.spec import JobSpec
from jobs.store import JobStore
from serving.weights.publish import publish_state_dict
from tests.bench.result import Figure, Result, at_most, reported, run_program
from tests.bench.timing import in_turns, percentile, seconds_of
from tests.hub_fixtures import running_hub
from tests.jobs_fixtures import running_postgres, until

MIB = 2**20
RUNNERS, CLAIMS, PICK_UPS = 4, 100, 20
STORE_MS, PICK_UP_MS, COPY_RATIO = 10, 100, 1.5


@dataclass(frozen=True, kw_only=True)
class Size:
    pipelines: int
    waiting: int
    """So many jobs wait while claims and lists are timed."""
    mib: int
    rounds: int


FULL = Size(pipelines=10_000, waiting=5_000, mib=350, rounds=5)
SMALL = Size(pipelines=60, waiting=50, mib=8, rounds=1)


def measure(size: Size) -> Result:
    """Four runners on one Postgres; a release to a follower elsewhere."""
    with tempfile.TemporaryDirectory() as name, running_postgres(fsync="on") as url:
        figures = (*_jobs(Path(name), url, size), *_release(Path(name), size))
    return Result(
        figures=figures,
        bounded_by="the processes of the jobs, each an agent and a command, on "
        f"{os.cpu_count()} cores, which the runners and Postgres share; for a release, sha256",
    )


def _jobs(folder: Path, url: str, size: Size) -> list[Figure]:
    with JobStore.open(url) as store:
        _push(store, range(size.waiting))
        listing = _ms(lambda: store.list(limit=20), CLAIMS)
        whole = _ms(store.list, 3)
        owners = [f"bench-{number}" for number in range(min(CLAIMS, size.waiting))]
        claimed: list[Job | None] = []
        claims = [
            1e3 * seconds_of(lambda owner=owner: claimed.append(store.claim(owner, 3600)))
            for owner in owners
        ]
        for job in claimed:
            assert job is not None and job.owner is not None
            store.release(job.id, job.owner)
        _push(store, range(size.waiting, size.pipelines))
        command = [sys.executable, "-m", "tests.jobs_runner_process", url, str(folder / "jobs")]
        started = time.perf_counter()
        runners = [subprocess.Popen(command) for _ in range(RUNNERS)]
        try:
            until(lambda: not store.has_open_jobs(), 3600, every_seconds=0.2)
            seconds = time.perf_counter() - started
            picked = [_pick_up_ms(store) for _ in range(PICK_UPS)]
        finally:
            for runner in runners:
                runner.terminate()
            for runner in runners:
                runner.wait()
        assert {job.state for job in store.list()} == {"COMPLETED"}
    waits = f"while {size.waiting:,} jobs wait"
    return [
        reported(f"{size.pipelines:,} pushes on {RUNNERS} runners", size.pipelines / seconds, "/s"),
        at_most(f"a claim {waits}, median", statistics.median(claims), STORE_MS, "ms"),
        reported("the same, p99", percentile(claims, 0.99), "ms"),
        at_most(f"a list of 20 jobs {waits}", statistics.median(listing), STORE_MS, "ms"),
        reported("a list of all of them", statistics.median(whole), "ms"),
        at_most("submitted → taken, median", statistics.median(picked), PICK_UP_MS, "ms"),
        reported("the slowest of them", max(picked), "ms"),
    ]


def _push(store: JobStore, numbers: range) -> None:
    for n in numbers:
        spec = JobSpec(command=("true",), pipeline=f"p{n}", debounce_seconds=0.0)
        store.submit(spec, delivery=Delivery(source="hub", id=str(n)))


def _pick_up_ms(store: JobStore) -> float:
    job = store.submit(JobSpec(command=("true",)))
    until(lambda: store.get(job.id).has_ended)
    return 1e3 * ((store.get(job.id).started_at or math.nan) - job.created_at)


def _ms(work: Callable[[], object], times: int) -> list[float]:
    return [1e3 * seconds_of(work) for _ in range(times)]


def _release(folder: Path, size: Size) -> list[Figure]:
    made, num_bytes = folder / "releases", 0

    def around(app: ASGIApp) -> ASGIApp:
        async def counted(scope: Scope, receive: Receive, send: Send) -> None:
            async def pass_on(message: Any) -> None:
                nonlocal num_bytes
                num_bytes += len(message.get("body", b""))
                await send(message)

            await app(scope, receive, pass_on)

        return counted

    (folder / "files").mkdir()
    (folder / "files" / "config.json").write_text("{}")
    tensors = {
        f"layer.{n}": torch.randn(size.mib * MIB // 80, dtype=torch.float32) for n in range(20)
    }
    changed = {**tensors, "layer.3": tensors["layer.3"] + 1, "layer.17": tensors["layer.17"] + 1}
    first, second = (
        publish_state_dict(made, each, files_dir=folder / "files", max_shard_bytes=64 * MIB).id
        for each in (tensors, changed)
    )
    with running_hub(folder / "hub", around=around, pipeline_dirs={"answers": made}) as hub:
        program = [sys.executable, "-m", "serving.weights.fetch"]

        def fetch(to: Path, release: str) -> None:
            env = {**os.environ, "HF_TOKEN": hub.token}
            command = [*program, str(to), hub.url, "local/answers", release]
            subprocess.run(command, env=env, check=True, stdout=subprocess.DEVNULL)

        def fetched() -> float:
            shutil.rmtree(folder / "elsewhere", ignore_errors=True)
            os.sync()
            return seconds_of(lambda: fetch(folder / "elsewhere", first))

        def copied() -> float:
            shutil.rmtree(folder / "copy", ignore_errors=True)
            os.sync()
            return seconds_of(lambda: (shutil.copytree(made / first, folder / "copy"), os.sync()))

        taken = in_turns(size.rounds, {"fetch": fetched, "copy": copied})
        num_bytes = 0
        fetch(folder / "elsewhere", second)
    ratio = statistics.median(taken["fetch"]) / statistics.median(taken["copy"])
    return [
        at_most(f"{size.mib} MiB to a follower, against a copy", ratio, COPY_RATIO, "x"),
        at_most("bytes moved for a change of a tenth", num_bytes / (size.mib * MIB), 0.12, "x"),
    ]


if __name__ == "__main__":
    run_program(measure, full=FULL, small=SMALL)
