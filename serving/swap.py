"""`Swapper` makes other releases live, and decides what the server serves at its start.

A live release answers all new requests. One swap runs at a time. The newest request wins: an older
swap ends before its next phase, unless the engine has begun to use its weights. The phases:

    preflight   the server checks the new release on disk and loads its tokenizer
    stage       the engine prepares the new weights, while the old release answers requests
    commit      the engine begins to use the new weights
    probe       the server compares log-probabilities with those that the job recorded
    barrier     from now on, new requests get the new release

If the engine can hold two releases, no request waits: new ones get the old release until the
barrier. If it holds one, the barrier comes before the commit: it waits until the running requests
have ended, and holds new ones back until the probe has ended.

If the commit or the probe fails, the engine commits the old release again. While the barrier is
closed, everything that is awaited has a time limit. So an engine or a disk that hangs cannot keep
the barrier closed.
"""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeVar

from serving.admission import Admission, LoadedRelease, Unserved
from serving.engine import Engine, Generation
from serving.errors import ReleaseError, Superseded, first_line, is_temporary
from serving.metrics import Metrics
from serving.questions import Kind, Questions, read_questions
from serving.settings import ServingSettings
from serving.swap_schemas import SwapPhase, SwapResult, SwapResultName
from serving.tokenizer import ReleaseTokenizer, load_tokenizer
from serving.weights import release_store
from serving.weights.publish import manifest_of_folder, servable_folder
from serving.weights.release import RELEASE_FILE, Probe, Release
from serving.weights.verify import verify_layout

logger = logging.getLogger(__name__)

T = TypeVar("T")


class SwapStopped(Exception):
    """Ends a swap. The release that was live before is still live."""

    def __init__(self, result: SwapResultName, *reasons: str, **more: str | None) -> None:
        self.outcome: dict[str, Any] = {"result": result, "reasons": reasons, **more}
        """Fields of the `SwapResult`."""


@dataclass(eq=False, kw_only=True)
class _Swap:
    """One swap: what was requested, and how far it has come."""

    folder: Path
    is_recorded: bool = True
    """Whether the next start of the server serves this release. False for a folder that was named
    at the start of the server."""
    stands_in_for: Unserved | None = None
    """If the release is a substitute: the release that could not be served."""
    previous: LoadedRelease | None = None
    """The release that is live when the swap begins."""
    phase: SwapPhase = "preflight"
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def timed(self, phase: SwapPhase) -> Iterator[None]:
        """Sets the phase, and measures the time of the `with` block."""
        self.phase = phase
        started = time.perf_counter()
        try:
            yield
        finally:
            earlier = self.seconds.get(phase, 0.0)
            self.seconds[phase] = earlier + time.perf_counter() - started


@dataclass(eq=False, kw_only=True)
class Swapper:
    """Runs the swaps of one server. Call all methods on its event loop."""

    engine: Engine
    admission: Admission
    settings: ServingSettings
    pipeline_dir: Path
    pipeline: str
    metrics: Metrics
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by the swap that runs."""
    _newest: _Swap | None = None
    """The swap that was requested last, if it has not ended."""
    _unfinished: dict[_Swap, asyncio.Task[SwapResult]] = field(default_factory=dict)
    _retiring: asyncio.Task[None] | None = None
    """Unloads the release that was live before, when its last request has ended. The task has the
    name of the release."""

    async def start(self, folder: Path | None = None) -> None:
        """Serve `folder`, or raise ReleaseError. If it is None, serve the release that was live
        last, and then swap in the pending release, if there is one.

        If the release that was live last is refused, the newest undamaged release that was live
        before it is served as its substitute. If there is none, the server waits for a swap, and
        its answers say why no release is served.
        """
        release_store.sweep(self.pipeline_dir)
        if folder is not None:
            folder = await asyncio.to_thread(servable_folder, folder, self.pipeline_dir)
            result = await self._enqueue(_Swap(folder=folder, is_recorded=False))
            if result.result != "live":
                raise ReleaseError(*result.reasons)
            return
        try:
            served = release_store.read_served(self.pipeline_dir)
        except ReleaseError as error:
            logger.error("%s", error)
            self.admission.unserved = Unserved(id=release_store.SERVED, reasons=error.reasons)
            return
        await self._start_with_last_live(served.history)
        if served.pending is not None:
            await self._enqueue(_Swap(folder=self.pipeline_dir / served.pending))

    async def _start_with_last_live(self, history: Sequence[str]) -> None:
        unserved: Unserved | None = None
        for release_id in reversed(history):
            result = await self._enqueue(
                _Swap(folder=self.pipeline_dir / release_id, stands_in_for=unserved)
            )
            if result.result == "live":
                if unserved is not None:
                    logger.error("%s; %s is served as its substitute", unserved, release_id)
                return
            unserved = unserved or Unserved(id=release_id, reasons=result.reasons)
            self.admission.unserved = unserved
            if result.result != "refused":
                # The engine or the disk has failed, so an older release would fail too.
                return
        if unserved is not None:
            logger.error("%s; there is no substitute for it", unserved)

    async def swap(
        self, requested: str, instead_of: Collection[str | None] | None = None
    ) -> SwapResult:
        """Make a release live. `SwapRequest` explains `requested` and `instead_of`. If the caller
        is cancelled, the swap goes on."""
        swap = _Swap(folder=self.pipeline_dir / requested, previous=self.admission.live)
        try:
            if requested not in release_store.release_ids(self.pipeline_dir):
                reason = f"there is no release in {self.pipeline_dir} for {requested!r}"
                raise SwapStopped("refused", reason)
            if instead_of is not None:
                await self._choose(requested, instead_of)
        except SwapStopped as stopped:
            return self._ended(swap, stopped.outcome)
        return await self._enqueue(swap)

    async def close(self) -> None:
        """End all swaps; they get the result `failed`. Stop the unloading of an old release."""
        tasks = [*self._unfinished.values(), *([self._retiring] if self._retiring else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _choose(self, release_id: str, instead_of: Collection[str | None]) -> None:
        """Mark the release as pending. A job has done so before it asked, but somebody may have
        chosen another release since, and a person who asks has not. Raises SwapStopped."""
        try:
            await asyncio.to_thread(
                release_store.set_pending, self.pipeline_dir, release_id, instead_of=instead_of
            )
            # Another release may have been chosen and requested before the thread ended.
            if (chosen := release_store.served_or_empty(self.pipeline_dir).chosen) != release_id:
                raise Superseded(release_id, chosen)
        except Superseded as moved:
            raise SwapStopped("superseded", str(moved), superseded_by=moved.chosen) from None
        except OSError as error:
            raise SwapStopped("failed", str(error)) from None

    async def _enqueue(self, swap: _Swap) -> SwapResult:
        """Begin the swap, or join the newest one if it is to the same release. Wait for the end."""
        if self._newest is None or self._newest.folder != swap.folder:
            self._newest = swap
            self._unfinished[swap] = asyncio.create_task(self._run(swap))
        return await asyncio.shield(self._unfinished[self._newest])

    async def _run(self, swap: _Swap) -> SwapResult:
        outcome: dict[str, Any] = {"result": "live"}
        try:
            async with self._lock:
                swap.previous = self.admission.live
                try:
                    self._stop_if_superseded(swap)
                    await self._swap(swap)
                    swap.phase = "live"
                except SwapStopped as stopped:
                    outcome = stopped.outcome
                except ReleaseError as error:
                    outcome = {"result": "refused", "reasons": error.reasons}
                except Exception as error:
                    logger.exception("swap to %s failed", swap.folder.name)
                    reason = f"{swap.phase}: {first_line(error)}"
                    outcome = {"result": "failed", "reasons": (reason,)}
                await self._clear_pending(swap, outcome["result"])
        except asyncio.CancelledError:
            outcome = {"result": "failed", "reasons": ("the server is shutting down",)}
        finally:
            del self._unfinished[swap]
            if self._newest is swap:
                self._newest = None
        return self._ended(swap, outcome)

    def _ended(self, swap: _Swap, outcome: dict[str, Any]) -> SwapResult:
        result = SwapResult(
            release=swap.folder.name,
            previous=None if swap.previous is None else swap.previous.id,
            phase=swap.phase,
            seconds=swap.seconds,
            **outcome,
        )
        if result.result == "live" or swap.is_recorded:  # otherwise `start` raises an error
            logger.log(
                logging.INFO if result.result == "live" else logging.WARNING,
                "swap to %s: %s in phase %s; %s",
                result.release,
                result.result,
                result.phase,
                "; ".join(result.reasons) or f"previous release {result.previous}",
                extra={"release": result.release},
            )
        self.metrics.count_swap(result)
        return result

    async def _clear_pending(self, swap: _Swap, result: SwapResultName) -> None:
        """Remove the mark `pending` of the release after its swap, even if the swap failed.
        Otherwise every start of the server would try a release that cannot be served."""
        newest = self._newest
        has_successor = newest is not None and newest is not swap and newest.folder == swap.folder
        is_asked_for = swap.is_recorded and swap.stands_in_for is None
        if result == "deferred" or has_successor or not is_asked_for:
            return  # a job asks again after `deferred`; a substitute was asked for by nobody
        try:
            await self._with_record(release_store.clear_pending, swap.folder.name)
        except SwapStopped as late:
            logger.error("%s", *late.outcome["reasons"])

    async def _swap(self, swap: _Swap) -> None:
        settings = self.settings
        candidate, previous = await self._preflight(swap), swap.previous
        if previous is not None and previous.id == candidate.id:
            # It was a substitute, or was named only at the start of the server. Now it is the
            # release that the next start serves.
            await self._record(swap, candidate)
            self.admission.live = replace(previous, folder=candidate.folder, stands_in_for=None)
            return
        with swap.timed("stage"):
            await self._until_retired()
        self._stop_if_superseded(swap)
        try:
            with swap.timed("stage"):
                staging = self.engine.stage(candidate.release, candidate.folder)
                is_first = previous is None  # it also starts the engine
                limit = settings.start_seconds if is_first else settings.phase_seconds
                await bounded(staging, limit, "stage took more than")
            fitting = self.engine.max_context(candidate.id) or candidate.context_length
            candidate = replace(candidate, context_length=min(fitting, candidate.context_length))
            probe, most = candidate.release.probe, candidate.context_length
            if probe is not None and any(len(text.token_ids) > most for text in probe.texts):
                reason = f"a text of its probe is longer than the {most} tokens that fit here"
                raise SwapStopped("refused", f"{reason}; raise max_context or kv_cache_bytes")
            with ExitStack() as barrier:
                if not self.engine.holds_two:
                    barrier.enter_context(self.admission.closed())
                    await self._drain(swap)
                self._stop_if_superseded(swap)
                await self._commit_and_record(swap, candidate)
                with swap.timed("barrier"):
                    self.admission.live = replace(candidate, live_since=int(time.time()))
        except BaseException:
            await self._tried(self.engine.unload(candidate.id), f"unload {candidate.id}")
            raise
        if previous is not None:
            self._retiring = asyncio.create_task(self._retire(previous.id), name=previous.id)

    def _stop_if_superseded(self, swap: _Swap) -> None:
        if self._newest is not None and self._newest is not swap:
            newest = self._newest.folder.name
            reason = f"a swap to {newest} was requested later"
            raise SwapStopped("superseded", reason, superseded_by=newest)

    async def _preflight(self, swap: _Swap) -> LoadedRelease:
        with swap.timed("preflight"):
            reading = asyncio.to_thread(self._read, swap.folder, swap.previous)
            try:
                release, tokenizer, questions = await bounded(
                    reading, self.settings.phase_seconds, "preflight took more than"
                )
            except (ReleaseError, OSError) as error:
                reasons = getattr(error, "reasons", (f"{swap.folder}: {error}",))
                # After a temporary error, an older release must not become a substitute.
                result: SwapResultName = "failed" if is_temporary(error) else "refused"
                raise SwapStopped(result, *reasons) from None
        self._stop_if_superseded(swap)
        return LoadedRelease(
            release=release,
            folder=swap.folder,
            tokenizer=tokenizer,
            context_length=tokenizer.context_length,
            stands_in_for=swap.stands_in_for,
            questions=questions,
        )

    def _read(
        self, folder: Path, live: LoadedRelease | None
    ) -> tuple[Release, ReleaseTokenizer, Mapping[Kind, Questions]]:
        release = checked_release(folder, self.engine, self.pipeline_dir, self.pipeline)
        # Use the live tokenizer if its files have not changed, as in most releases. While a
        # tokenizer is being loaded, no other thread can run, so all streams pause.
        if live is not None and release.tokenizer_files == live.release.tokenizer_files:
            tokenizer = live.tokenizer
        else:
            tokenizer = load_tokenizer(folder)
        grounds = self.settings.ground == "assist"
        return release, tokenizer, read_questions(folder) if grounds else {}

    async def _until_retired(self) -> None:
        """Wait for the memory of the release that was live before. Raises SwapStopped."""
        if self._retiring is not None:
            name = self._retiring.get_name()
            late = f"{name} must leave the engine first, and requests on it did not end in"
            # Use `wait`: if this wait is cancelled, the unloading goes on.
            ended = asyncio.wait({self._retiring})
            await bounded(ended, self.settings.drain_seconds, late, "deferred")

    async def _drain(self, swap: _Swap) -> None:
        with swap.timed("barrier"):
            if swap.previous is not None:
                drained = self.admission.drained(swap.previous.id)
                late = f"requests on {swap.previous.id} did not end in"
                await bounded(drained, self.settings.drain_seconds, late, "deferred")

    async def _commit_and_record(self, swap: _Swap, candidate: LoadedRelease) -> None:
        """Make the engine use `candidate`, and record it, if its probe agrees. Otherwise make the
        engine use the previous release again, and raise the error."""
        try:
            with swap.timed("commit"):
                committed = self.engine.commit(candidate.id)
                await bounded(committed, self.settings.barrier_seconds, "commit took more than")
            await self._probe(swap, candidate)
            await self._record(swap, candidate)
        except BaseException:
            if swap.previous is not None:
                again = self.engine.commit(swap.previous.id)
                await self._tried(again, f"use {swap.previous.id} again after a swap that failed")
            raise

    async def _probe(self, swap: _Swap, candidate: LoadedRelease) -> None:
        probe, settings = candidate.release.probe, self.settings
        if probe is None:
            return
        limit = settings.phase_seconds if self.engine.holds_two else settings.barrier_seconds
        with swap.timed("probe"):
            bound = probe.bounds[self.engine.dtype_of(candidate.release)]
            measured = measure_probe(self.engine, candidate.id, probe, bound)
            reasons = await bounded(measured, limit, "probe took more than")
        if reasons:
            raise SwapStopped("refused", *reasons)

    async def _record(self, swap: _Swap, live: LoadedRelease) -> None:
        """Record on disk that `live` is served. Raises SwapStopped. The record is then what it was;
        but if the disk hangs, both writes go on after that."""
        if not swap.is_recorded:
            return
        chosen = None if live.stands_in_for is None else live.stands_in_for.id
        earlier = await self._with_record(release_store.served_or_empty)
        try:
            await self._with_record(release_store.set_current, live.id, chosen)
        except BaseException:
            with suppress(SwapStopped):
                await self._with_record(release_store.set_back, earlier)
            raise

    async def _with_record(self, act: Callable[..., T], *changes: object) -> T:
        """Let `act` read or change the record of what is served. Raises SwapStopped if this fails
        or takes too long."""
        path = self.pipeline_dir / release_store.SERVED
        written = asyncio.to_thread(act, self.pipeline_dir, *changes)
        try:
            return await bounded(
                written, self.settings.barrier_seconds, f"{path}: not written within"
            )
        except (OSError, ReleaseError) as error:
            raise SwapStopped("failed", f"{path}: {error}") from None

    async def _retire(self, release_id: str) -> None:
        await self.admission.drained(release_id)
        await self._tried(self.engine.unload(release_id), f"unload {release_id}")

    async def _tried(self, work: Awaitable[None], what: str) -> None:
        try:
            await bounded(work, self.settings.barrier_seconds, "it took more than")
        except Exception:
            logger.exception("the engine failed to %s", what)


async def bounded(
    work: Awaitable[T], seconds: float, late: str, result: SwapResultName = "failed"
) -> T:
    """The result of `work`. If it takes longer than `seconds`, cancels it and raises SwapStopped at
    once, because it may ignore the cancellation. `late` is the reason, up to the seconds."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task}, timeout=seconds)
        if not task.done():
            raise SwapStopped(result, f"{late} {seconds:g} s")
        return task.result()
    finally:
        task.cancel()


def checked_release(folder: Path, engine: Engine, pipeline_dir: Path, pipeline: str) -> Release:
    """The manifest of a release or a checkpoint folder. Raises ReleaseError if `folder` has faults,
    and OSError."""
    if release_store.is_checkpoint(folder, pipeline_dir):
        return manifest_of_folder(folder, pipeline)
    try:
        release = release_store.load_release(folder)
    except ReleaseError as error:
        advice = (
            f"without a valid {RELEASE_FILE}, the release cannot be checked; run "
            "`pipeline releases verify`"
        )
        raise ReleaseError(*error.reasons, advice) from None
    reasons = list(verify_layout(folder, release))
    if folder.parent == pipeline_dir and folder.name != release.id:
        reasons.append(f"{RELEASE_FILE}: its id is {release.id}, but its folder is {folder.name}")
    dtype = engine.dtype_of(release)
    if release.probe is not None and dtype not in release.probe.bounds:
        reasons.append(
            f"{RELEASE_FILE}: its probe has no bound for {dtype}, the dtype of this server; it "
            f"has bounds only for {', '.join(release.probe.bounds) or 'nothing'}"
        )
    if reasons:
        raise ReleaseError(*reasons)
    return release


async def measure_probe(engine: Engine, release_id: str, probe: Probe, bound: float) -> list[str]:
    """Compute the logprob of each token in each text of `probe`, given the tokens before it, and
    compare it with the logprob of the job. Returns a reason for each text with a difference above
    `bound`. If a logprob is not finite or is missing, the difference is infinite.

    Only this shows that the engine computes with all weights of the release. If the engine only
    reports success, this is no proof. Raises EngineError.
    """
    scoring = [
        asyncio.create_task(_score(engine, release_id, text.token_ids)) for text in probe.texts
    ]
    try:
        scored = await asyncio.gather(*scoring)
    finally:  # after an error, the engine must not go on with the other texts
        for task in scoring:
            task.cancel()
        await asyncio.gather(*scoring, return_exceptions=True)
    reasons = []
    for number, (text, found) in enumerate(zip(probe.texts, scored, strict=True), start=1):
        pairs = list(zip_longest(text.logprobs, found, fillvalue=math.nan))
        differences = [
            abs(there - here) if math.isfinite(there) and math.isfinite(here) else math.inf
            for there, here in pairs
        ]
        worst = max(differences, default=0.0)
        if worst > bound:
            place = differences.index(worst)
            there, here = pairs[place]
            reasons.append(
                # The first token of a text has no logprob, so the first logprob is token 2's.
                f"probe text {number}, token {place + 2}: logprob {here:.5f} instead of "
                f"{there:.5f}; they may differ by at most {bound:g}"
            )
    return reasons


async def _score(engine: Engine, release_id: str, token_ids: tuple[int, ...]) -> list[float]:
    generation = Generation(prompt=token_ids, max_tokens=0, temperature=0.0, num_prompt_logprobs=0)
    logprobs: list[float] = []
    async for step in engine.generate(release_id, generation):
        logprobs += [each.logprob for each in step.prompt_logprobs or ()]
    return logprobs
