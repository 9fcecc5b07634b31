"""Start until the first token: from the start of the process, imports included, to an answer.

The files are in the page cache: a round that is not counted has read them.
"""

import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.bench.networks import build, publish
from tests.bench.result import Result, at_most, reported, run_program
from tests.bench.server import ServerName, pipeline_dir, serving
from tests.bench.timing import in_turns


@dataclass(frozen=True, kw_only=True)
class Size:
    shape: str
    rounds: int
    vllm: int
    """0 leaves vLLM out, for an environment that has none."""


FULL, SMALL = Size(shape="88M", rounds=3, vllm=1), Size(shape="tiny", rounds=1, vllm=0)
TARGET_SECONDS = 8.0
LABELS = {
    "torch": "our server, torch engine",
    "vllm": "our server, vLLM engine, not compiled",
    "vllm-own": "vLLM's own server, default settings",
}


def measure(size: Size) -> Result:
    """Seconds from the start of a server to its first token."""
    names: tuple[ServerName, ...] = ("torch", "vllm", "vllm-own") if size.vllm else ("torch",)
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        release = publish(build(size.shape, 1), pipeline_dir(home))

        def start(server: ServerName) -> float:
            with serving(server, release, home) as started:
                return started.start_seconds

        found = in_turns(size.rounds + 1, {each: lambda each=each: start(each) for each in names})
    median = {each: statistics.median(found[each][1:]) for each in names}
    return Result(
        figures=(
            at_most(f"{LABELS['torch']}, {size.shape}", median["torch"], TARGET_SECONDS, "s"),
            *(reported(f"{LABELS[each]}, {size.shape}", median[each], "s") for each in names[1:]),
        ),
        bounded_by="imports of torch and the server, then the digests of the release",
        detail={each: list(seconds) for each, seconds in found.items()},
    )


if __name__ == "__main__":
    run_program(measure, full=FULL, small=SMALL)
