"""Inter-token time of the server while a job trains beside it, against an idle machine.

A real stack with the default thread caps. One client streams greedy answers; idle stretches before
and after the training are measured as well as the stretch from its first step to its last.
"""

import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx

from pipeline.retrain.metrics import read_metrics
from tests.bench.live_stack import LIMIT_SECONDS, POLL_SECONDS, LiveStack, live_stack
from tests.bench.result import Result, at_most, reported, run_program
from tests.bench.timing import percentile
from tests.stack_fixtures import configure, facts, workplace_in


@dataclass(frozen=True, kw_only=True)
class Size:
    tokens: int
    """That the job trains on beside the server."""
    idle_seconds: float


FULL, SMALL = Size(tokens=150_000, idle_seconds=30.0), Size(tokens=4_000, idle_seconds=1.0)
RATIO = 2.0
NEW_TOKENS = 200


def measure(size: Size) -> Result:
    """p99 of the inter-token time while a job trains, against idle."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # Nothing ends the training early.
        train = {"max_tokens": size.tokens, "max_epochs": 1e6}
        configure(workplace_in(folder), **train, mode="full")
        with live_stack(folder) as stack:
            stack.learn({"facts.jsonl": facts(0, 200)}, ("promoted",))
            deadline = time.monotonic() + size.idle_seconds
            before = _gaps(stack, lambda: time.monotonic() < deadline)
            known = stack.jobs()
            stack.push({"facts.jsonl": facts(0, 400)})
            job, _ = stack.first_line(known)
            training = _until_it_trains(stack, job)
            beside = _gaps(stack, lambda: not _is_over(training))
            stack.outcome(job)
            deadline = time.monotonic() + size.idle_seconds
            after = _gaps(stack, lambda: time.monotonic() < deadline)
    idle = before + after
    ratio = percentile(beside, 0.99) / percentile(idle, 0.99)
    return Result(
        figures=(
            at_most("p99 while a job trains / idle", ratio, RATIO, "x"),
            reported("p99 idle", 1e3 * percentile(idle, 0.99), "ms"),
            reported("p99 while a job trains", 1e3 * percentile(beside, 0.99), "ms"),
            reported("median idle", 1e3 * percentile(idle, 0.5), "ms"),
            reported("median while a job trains", 1e3 * percentile(beside, 0.5), "ms"),
            reported("tokens while it trained", len(beside), ""),
        ),
        bounded_by="cores: the server leaves the job one, and all else on the machine shares the "
        "others with it; memory bandwidth and caches are shared, too",
        detail={"p99_before": percentile(before, 0.99), "p99_after": percentile(after, 0.99)},
    )


def _gaps(stack: LiveStack, goes_on: Callable[[], bool]) -> list[float]:
    """Seconds between the tokens of one answer after another; an answer is not cut off when it is
    time to stop, but what is left of it does not count."""
    gaps: list[float] = []
    body = {
        "prompt": "Shelf 3 holds",
        "max_tokens": NEW_TOKENS,
        "temperature": 0,
        # The end of a text is a token without one, and no event.
        "min_tokens": NEW_TOKENS,
        "stream": True,
    }
    with httpx.Client(base_url=stack.workplace.url("serving"), timeout=120) as http:
        while goes_on():
            with http.stream("POST", "/v1/completions", json=body) as answer:
                answer.raise_for_status()
                last = None
                for line in answer.iter_lines():
                    if not line.startswith("data: {"):
                        continue
                    now = time.perf_counter()
                    if last is not None:
                        gaps.append(now - last)
                    last = now
                    if not goes_on():
                        break
    return gaps


def _until_it_trains(stack: LiveStack, job: Path) -> Path:
    deadline = time.monotonic() + LIMIT_SECONDS
    metrics = job / "metrics.jsonl"
    while not any(each.event == "step" for each in read_metrics(metrics)[0]):
        if time.monotonic() > deadline:
            raise RuntimeError(f"{job.name} does not train\n{stack.workplace.logs()}")
        time.sleep(POLL_SECONDS)
    return metrics


def _is_over(metrics: Path) -> bool:
    """Looks at the last line only: the client is not to be slowed down by a long file."""
    with metrics.open("rb") as file:
        file.seek(0, 2)
        file.seek(max(0, file.tell() - 400))
        *lines, _ = file.read().split(b"\n")  # what follows the last end is being written
    last = json.loads(lines[-1])
    return bool(last["stage"] != "train" or last["event"] == "end")


if __name__ == "__main__":
    run_program(measure, full=FULL, small=SMALL)
