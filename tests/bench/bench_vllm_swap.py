"""A swap on vLLM, by our server, beside what vLLM has itself: `reload_weights`.

Our server with vLLM behind it, and vLLM's own server, are up at once, under the same load while it
is their turn. Ours waits at the barrier until the requests under way have ended, exchanges the
weights (the engine's pause), probes, and lets requests in. vLLM's own pause is its call, which
computes nothing else meanwhile. After each, the time to a first token, and whether greedy answers
are those of `transformers` on that release: embeddings are tied, whose packed head vLLM's own way
forgets on a CPU.
"""

import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.bench.networks import Published, build, prompt_of, publish, right_texts
from tests.bench.result import Figure, Result, at_least, at_most, reported, run_program
from tests.bench.server import Server, pipeline_dir, serving
from tests.bench.timing import in_turns


@dataclass(frozen=True, kw_only=True)
class Size:
    shapes: tuple[str, ...]
    rounds: int
    clients: int
    tokens: int
    """Of each answer of the load."""
    prompts: int
    """Whose right answers are known."""
    compiles: bool = True
    """Whether vLLM's own server compiles the model, as a user's does."""


FULL = Size(shapes=("88M", "350M"), rounds=6, clients=4, tokens=32, prompts=3)
SMALL = Size(shapes=("tiny",), rounds=2, clients=2, tokens=8, prompts=2, compiles=False)
CHECKED_TOKENS = 8
PAUSE_SHARE = 0.25


@dataclass(frozen=True, kw_only=True)
class Swap:
    """Seconds, and the share of the answers after it that are right."""

    pause: float
    first_token: float
    right: float
    stage: float = 0.0
    barrier: float = 0.0
    probe: float = 0.0


def measure(size: Size) -> Result:
    """Barrier wait, engine pause and first token of a swap on vLLM, against reload_weights."""
    figures: list[Figure] = []
    detail: dict[str, Any] = {}
    for shape in size.shapes:
        found = _measure(shape, size)
        figures += _figures(shape, found)
        detail[shape] = {name: [asdict(each) for each in swaps] for name, swaps in found.items()}
    return Result(
        figures=tuple(figures),
        bounded_by="the pause: calls to vLLM's processes, and an exchange of tensors that were "
        "staged; the barrier: the longest answer that is under way",
        detail=detail,
    )


def _figures(shape: str, found: Mapping[str, list[Swap]]) -> list[Figure]:
    def median(name: str, value: Callable[[Swap], float]) -> float:
        return statistics.median(map(value, found[name]))

    ours = median("ours", lambda swap: swap.pause)
    theirs = median("reload", lambda swap: swap.pause)
    behind = median("ours", lambda swap: swap.pause + swap.probe)
    right = {name: statistics.mean(swap.right for swap in found[name]) for name in found}
    return [
        at_most(f"{shape}: engine pause / `reload_weights`", ours / theirs, PAUSE_SHARE, "x"),
        at_least(f"{shape}: right answers after a swap", 100 * right["ours"], 100.0, "%"),
        reported(f"{shape}: right answers after `reload_weights`", 100 * right["reload"], "%"),
        reported(f"{shape}: engine pause", 1e3 * ours, "ms"),
        reported(f"{shape}: `reload_weights`", 1e3 * theirs, "ms"),
        reported(f"{shape}: pause and probe / `reload_weights`", behind / theirs, "x"),
        reported(
            f"{shape}: wait for running requests (barrier)",
            1e3 * median("ours", lambda swap: swap.barrier),
            "ms",
        ),
        reported(
            f"{shape}: first token after a swap",
            1e3 * median("ours", lambda swap: swap.first_token),
            "ms",
        ),
        reported(
            f"{shape}: first token after `reload_weights`",
            1e3 * median("reload", lambda swap: swap.first_token),
            "ms",
        ),
        reported(
            f"{shape}: staging while requests run", median("ours", lambda swap: swap.stage), "s"
        ),
    ]


def _measure(shape: str, size: Size) -> dict[str, list[Swap]]:
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        published = [publish(build(shape, seed), pipeline_dir(home)) for seed in (1, 2)]
        prompts, texts = right_texts(published, size.prompts, CHECKED_TOKENS)
        folders = [
            Published(release_id=each.release_id, folder=each.folder, network=None)
            for each in published
        ]
        del published  # their memory is needed
        right = _Right(prompts, texts)
        with (
            serving("vllm", folders[0], home) as ours,
            serving("vllm-own", folders[0], home, compiles=size.compiles) as theirs,
        ):
            for server in (ours, theirs):
                if right.share(server, folders[0]) < 1:
                    raise RuntimeError(f"{server.url} answers wrongly before anything is swapped")
            turn = {"ours": 0, "reload": 0}

            def next_of(server: str) -> Published:
                turn[server] += 1
                return folders[turn[server] % 2]

            return in_turns(
                size.rounds,
                {
                    "ours": lambda: _swap(ours, next_of("ours"), right, size),
                    "reload": lambda: _reload(theirs, next_of("reload"), right, size),
                },
            )


class _Right:
    def __init__(self, prompts: list[list[int]], texts: Mapping[tuple[str, int], str]) -> None:
        self._prompts = prompts
        self._texts = texts

    def share(self, server: Server, release: Published) -> float:
        """Of the prompts, those that are answered as the release answers them."""
        num_right = 0
        for number, prompt in enumerate(self._prompts):
            text = server.ask(prompt, CHECKED_TOKENS)["choices"][0]["text"]
            # Servers differ in the spaces between tokens.
            right = self._texts[release.release_id, number]
            num_right += text.replace(" ", "") == right.replace(" ", "")
        return num_right / len(self._prompts)


def _swap(server: Server, release: Published, right: _Right, size: Size) -> Swap:
    with _loaded(server, size):
        seconds = server.swap(release.release_id)["seconds"]
        first_token = _first_token(server)
    return Swap(
        pause=seconds["commit"],
        first_token=first_token,
        right=right.share(server, release),
        stage=seconds["stage"],
        barrier=seconds["barrier"],
        probe=seconds["probe"],
    )


def _reload(server: Server, release: Published, right: _Right, size: Size) -> Swap:
    with _loaded(server, size):
        pause = server.reload_weights(release.folder)
        first_token = _first_token(server)
    return Swap(pause=pause, first_token=first_token, right=right.share(server, release))


def _first_token(server: Server) -> float:
    started = time.perf_counter()
    server.ask(prompt_of(time.perf_counter_ns() % 1_000_003), 1)
    return time.perf_counter() - started


@contextmanager
def _loaded(server: Server, size: Size) -> Iterator[None]:
    """Clients that ask one thing after another, each at least once before the block begins."""
    stop = threading.Event()
    warm = threading.Barrier(size.clients + 1)

    def client(number: int) -> None:
        is_first = True
        while is_first or not stop.is_set():
            number += size.clients
            server.ask(prompt_of(number), size.tokens)
            if is_first:
                is_first = False
                warm.wait()

    with ThreadPoolExecutor(size.clients) as pool:
        asking = [pool.submit(client, number) for number in range(size.clients)]
        try:
            warm.wait(timeout=300)
            yield
        finally:
            stop.set()
            warm.abort()
        for each in asking:
            each.result()


if __name__ == "__main__":
    run_program(measure, full=FULL, small=SMALL)
