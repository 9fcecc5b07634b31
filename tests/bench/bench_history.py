"""What a commit costs on a long history, beside what it costs at commit 100.

Two real stacks are up at once and take turns: one with a hundred commits, jobs and deliveries and
five releases, one with many. First commits that change no row, whose jobs end as `unchanged`, so
that fixed costs are all there is; then commits of new rows, which train the same little and are
released.
"""

import shutil
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.bench.live_stack import LiveStack, live_stack
from tests.bench.past import add_commits, add_deliveries, add_jobs, add_releases
from tests.bench.result import Figure, Result, at_most, reported, run_program
from tests.bench.timing import in_turns
from tests.stack_fixtures import configure, facts, workplace_in


@dataclass(frozen=True, kw_only=True)
class Size:
    commits: int
    releases: int
    unchanged: int
    """Commits that change no row."""
    trained: int


FULL = Size(commits=10_000, releases=200, unchanged=20, trained=5)
SMALL = Size(commits=300, releases=8, unchanged=1, trained=1)
SHORT_COMMITS, SHORT_RELEASES = 100, 5
RATIO = 1.5
SERVICES = ("hub", "receiver", "runner")


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Seconds of one commit."""

    push: float
    """That `git push` took."""
    first_line: float
    """From then until the job's first line."""
    job: float
    """From then until its outcome."""
    cpu: Mapping[str, float]
    """Of each service."""

    @property
    def total(self) -> float:
        return self.push + self.first_line + self.job


def measure(size: Size) -> Result:
    """From `git push` to the job's outcome: long history against commit 100."""
    with tempfile.TemporaryDirectory() as name:
        short_dir, long_dir = Path(name) / "short", Path(name) / "long"
        _begin(short_dir)
        shutil.copytree(short_dir, long_dir, symlinks=True)
        _grow_old(short_dir, SHORT_COMMITS, SHORT_RELEASES)
        _grow_old(long_dir, size.commits, size.releases)
        known = {folder: _job_names(folder) for folder in (short_dir, long_dir)}
        with live_stack(short_dir) as short, live_stack(long_dir) as long:
            for folder, stack in ((short_dir, short), (long_dir, long)):
                # The hub has found commits that nobody pushed, and told of them.
                stack.outcome(stack.first_line(known[folder])[0])
                _commit(stack, {"README.md": "Warm.\n"})
            unchanged = in_turns(
                size.unchanged,
                {"short": lambda: _note(short), "long": lambda: _note(long)},
            )
            trained = in_turns(
                size.trained,
                {"short": lambda: _rows(short), "long": lambda: _rows(long)},
            )
    history = f"{size.commits:,} commits and jobs, {size.releases} releases"
    return Result(
        figures=(
            *_compared("a commit that changes no row", unchanged, history),
            *_compared("a commit of new rows", trained, history),
        ),
        bounded_by=_grown(unchanged),
        detail={
            kind: {name: [_plain(each) for each in costs] for name, costs in found.items()}
            for kind, found in (("unchanged", unchanged), ("trained", trained))
        },
    )


def _begin(folder: Path) -> None:
    """A stack with a first commit and its release, stopped."""
    folder.mkdir()
    workplace = workplace_in(folder)
    configure(workplace, max_tokens=2_000)
    settings = folder / "pipeline.toml"
    kept = settings.read_text().replace("[pipelines.train]", "keep = 100000\n[pipelines.train]")
    settings.write_text(kept)
    with live_stack(folder) as stack:
        stack.learn({"facts.jsonl": facts(0, 60)}, ("promoted",))


def _grow_old(folder: Path, commits: int, releases: int) -> None:
    workplace = workplace_in(folder)
    add_commits(workplace.home / "hub/repos/datasets/local/facts.git", commits)
    add_releases(workplace.home / "releases" / "facts", releases)
    add_jobs(workplace.home / "jobs", commits)
    add_deliveries(workplace.home / "hub" / "hub.sqlite", commits)


def _job_names(folder: Path) -> set[str]:
    return {each.name for each in (workplace_in(folder).home / "jobs").glob("j[0-9]*")}


def _note(stack: LiveStack) -> Cost:
    return _commit(stack, {"README.md": f"After {len(stack.jobs())} jobs.\n"})


def _rows(stack: LiveStack) -> Cost:
    count = (stack.clone / "facts.jsonl").read_text().count("\n")
    return _commit(stack, {"facts.jsonl": facts(0, count + 10)})


def _commit(stack: LiveStack, files: Mapping[str, str]) -> Cost:
    known, before = stack.jobs(), stack.cpu_seconds()
    push = stack.push(files)
    folder, first_line = stack.first_line(known)
    outcome, ended = stack.outcome(folder)
    if outcome["result"] not in ("unchanged", "promoted", "rejected"):
        raise RuntimeError(f"the job ended as {outcome}\n{stack.workplace.logs()}")
    after = stack.cpu_seconds()
    return Cost(
        push=push.returned - push.started,
        first_line=first_line - push.returned,
        job=ended - first_line,
        cpu={name: after[name] - before[name] for name in SERVICES},
    )


def _compared(what: str, found: Mapping[str, Sequence[Cost]], history: str) -> tuple[Figure, ...]:
    totals = {
        name: statistics.median(cost.total for cost in costs) for name, costs in found.items()
    }
    return (
        at_most(f"{what}: {history} / commit 100", totals["long"] / totals["short"], RATIO, "x"),
        reported(f"{what}, at commit 100", totals["short"], "s"),
        reported(f"{what}, {history}", totals["long"], "s"),
    )


def _grown(found: Mapping[str, Sequence[Cost]]) -> str:
    """Where the extra time of a long history goes."""
    parts = {}
    for part in ("push", "first_line", "job"):
        short, long = (
            statistics.median(getattr(cost, part) for cost in found[name])
            for name in ("short", "long")
        )
        parts[part.replace("_", " ")] = f"{1e3 * short:.0f} → {1e3 * long:.0f} ms"
    for name in SERVICES:
        short, long = (
            statistics.mean(cost.cpu[name] for cost in found[length])
            for length in ("short", "long")
        )
        parts[f"CPU of the {name}"] = f"{1e3 * short:.0f} → {1e3 * long:.0f} ms"
    return "a commit that changes no row: " + ", ".join(f"{n} {v}" for n, v in parts.items())


def _plain(cost: Cost) -> dict[str, float]:
    seconds = {"push": cost.push, "first_line": cost.first_line, "job": cost.job}
    return seconds | {f"cpu_{name}": spent for name, spent in cost.cpu.items()}


if __name__ == "__main__":
    run_program(measure, full=FULL, small=SMALL)
