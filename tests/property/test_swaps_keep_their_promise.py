"""Whatever an engine does during a swap: what answers is the last release that went live."""

import asyncio
import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.admission import Admission, LoadedRelease
from serving.engine import EngineError, Generation
from serving.errors import ReleaseError
from serving.metrics import Metrics
from serving.settings import ServingSettings
from serving.swap import Swapper
from serving.weights.release import Release
from serving.weights.release_store import served_release
from tests.echo_engine import EchoEngine
from tests.serving_fixtures import echo_release


@pytest.fixture(scope="module")
def shelf() -> Iterator[tuple[Path, list[Release]]]:
    with tempfile.TemporaryDirectory() as name:
        pipeline_dir = Path(name) / "answers"
        found = [echo_release(pipeline_dir, seed) for seed in range(3)]
        yield pipeline_dir, [*found, echo_release(pipeline_dir, 3, probe_shift=1.0)]


FAULTS = {
    "none": None,
    "unfit": ("stage", ReleaseError("a.safetensors: tensor x: NaN")),
    "stage": ("stage", EngineError("no memory")),
    "commit": ("commit", EngineError("lost a worker")),
    "probe": ("generate", EngineError("died")),
}

SWAP = st.tuples(st.integers(0, 3), st.sampled_from(sorted(FAULTS)), st.booleans(), st.booleans())


@settings(max_examples=40, deadline=None)
@given(holds_two=st.booleans(), swaps=st.lists(SWAP, min_size=1, max_size=8))
def test_the_last_live_swap_answers(
    shelf: tuple[Path, list[Release]],
    holds_two: bool,
    swaps: list[tuple[int, str, bool, bool]],
) -> None:
    pipeline_dir, found = shelf
    (pipeline_dir / "served.json").unlink(missing_ok=True)

    async def story() -> None:
        engine = EchoEngine(holds_two=holds_two)
        admission = Admission(1_000, "answers")
        swapper = Swapper(
            engine=engine,
            admission=admission,
            settings=ServingSettings(drain_seconds=0.01, phase_seconds=5, barrier_seconds=5),
            pipeline_dir=pipeline_dir,
            pipeline="answers",
            metrics=Metrics("answers"),
        )
        expected: str | None = None
        open_requests: list[LoadedRelease] = []
        for number, fault, opens, closes in swaps:
            if opens and expected is not None:
                open_requests.append(await admission.enter())
            engine.fail = {FAULTS[fault][0]: FAULTS[fault][1]} if FAULTS[fault] else {}  # type: ignore[index]
            result = await swapper.swap(found[number].id)
            engine.fail = {}
            if result.result == "live":
                assert number != 3, "a probe that does not match was taken"
                expected = found[number].id
            assert result.result in ("live", "refused", "failed", "deferred")
            if closes and open_requests:
                admission.leave(open_requests.pop(0))
            assert admission.open.is_set()
            assert (admission.live and admission.live.id) == expected
            served = served_release(pipeline_dir)
            assert (served and served.name) == expected
            for live in itertools.chain(open_requests, [admission.live] if admission.live else []):
                generation = Generation(prompt=(1, 2), max_tokens=1, temperature=0.0)
                assert [step async for step in engine.generate(live.id, generation)]
        for live in open_requests:
            admission.leave(live)
        async with asyncio.timeout(5):
            while engine.resident != ({expected} if expected else set()):
                await asyncio.sleep(0)
        await swapper.close()

    asyncio.run(story())
