"""From `git push` returned to the first line of the job's log: with preloaded modules and without.

Two real stacks without a debounce are up at once, and take turns. The commits change no row, so
that jobs end at once; what is measured is over before they notice.
"""

import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.bench.live_stack import LiveStack, live_stack
from tests.bench.result import Result, at_most, reported, run_program
from tests.bench.timing import in_turns
from tests.stack_fixtures import configure, facts, workplace_in


@dataclass(frozen=True, kw_only=True)
class Size:
    pushes: int


FULL, SMALL = Size(pushes=20), Size(pushes=2)
TARGET_SECONDS = 0.3


def measure(size: Size) -> Result:
    """From `git push` returned to the first line of the job's log."""
    with tempfile.TemporaryDirectory() as name:
        folders = {each: Path(name) / each for each in ("warm", "cold")}
        for folder in folders.values():
            folder.mkdir()
            configure(workplace_in(folder), max_tokens=2_000)
        with (
            live_stack(folders["warm"]) as warm,
            live_stack(folders["cold"], PIPELINE_JOBS__PRELOAD="[]") as cold,
        ):
            for stack in (warm, cold):
                stack.learn({"facts.jsonl": facts(0, 60)}, ("promoted",))
            found = in_turns(
                size.pushes, {"warm": lambda: _push(warm), "cold": lambda: _push(cold)}
            )
    return Result(
        figures=(
            at_most(
                f"push returned → first line, median of {size.pushes}",
                statistics.median(found["warm"]),
                TARGET_SECONDS,
                "s",
            ),
            reported("the slowest of them", max(found["warm"]), "s"),
            reported(
                "without preloaded modules (`preload = []`), median",
                statistics.median(found["cold"]),
                "s",
            ),
        ),
        bounded_by="the hub's delivery, the receiver's transaction, the runner's poll (20 ms), and "
        "a fork that has the modules; without `preload`, the job imports them",
        detail={name: list(seconds) for name, seconds in found.items()},
    )


def _push(stack: LiveStack) -> float:
    known = stack.jobs()
    push = stack.push({"README.md": f"Commit after {len(known)} jobs.\n"})
    folder, first_line = stack.first_line(known)
    stack.outcome(folder)
    return first_line - push.returned


if __name__ == "__main__":
    run_program(measure, full=FULL, small=SMALL)
