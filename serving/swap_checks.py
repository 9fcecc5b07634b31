"""The checks of a swap. The preflight checks on disk whether a folder may be served. The probe
compares the logprobs that the engine computes with those that the job recorded.

Only the probe shows that the engine computes with all weights of the release. If the engine only
reports success, this is no proof.
"""

import asyncio
import math
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from serving.engine import Engine, Generation
from serving.errors import ReleaseError
from serving.weights import release_store
from serving.weights.index import has_bin
from serving.weights.publish import checkpoint_weight_map, manifest_of_folder, publish_folder
from serving.weights.release import RELEASE_FILE, Probe, Release
from serving.weights.verify import verify_layout, verify_release


def servable_folder(folder: Path, releases_dir: Path) -> Path:
    """`folder`, or a release that is published from it if it is a checkpoint with `.bin` shards. No
    engine reads such shards, because they are pickles. Raises ReleaseError and OSError."""
    if _is_checkpoint(folder, releases_dir) and has_bin(checkpoint_weight_map(folder).values()):
        return releases_dir / publish_folder(releases_dir, folder).id
    return folder


def _is_checkpoint(folder: Path, releases_dir: Path) -> bool:
    is_inside = folder.resolve().is_relative_to(releases_dir.resolve())
    return not is_inside and not (folder / RELEASE_FILE).exists()


def checked_release(folder: Path, engine: Engine, releases_dir: Path, pipeline: str) -> Release:
    """The manifest of a release or a checkpoint folder. Raises ReleaseError if `folder` has faults,
    and OSError."""
    if _is_checkpoint(folder, releases_dir):
        return manifest_of_folder(folder, pipeline)
    try:
        release = release_store.load_release(folder)
    except ReleaseError as error:
        advice = (
            f"without a valid {RELEASE_FILE}, the release cannot be checked; run "
            "`pipeline releases verify`"
        )
        raise ReleaseError(*error.reasons, advice) from None
    verify = verify_layout if engine.checks_digests else verify_release
    reasons = list(verify(folder, release))
    if folder.parent == releases_dir and folder.name != release.id:
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


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeResult:
    """How much the logprobs of the engine differ from the logprobs of the job."""

    max_difference: float
    """The largest absolute difference between a logprob of the engine and the logprob of the job;
    infinite if a logprob is not finite or is missing."""
    reasons: tuple[str, ...]
    """For each text with a difference above the bound, the token with the largest difference. Empty
    if the engine agrees with the job."""


async def measure_probe(engine: Engine, release_id: str, probe: Probe, bound: float) -> ProbeResult:
    """Compute the logprob of each token in each text of `probe`, given the tokens before it, and
    compare it with the logprob of the job.

    `bound` is the largest accepted absolute difference. Raises EngineError.
    """
    scored = await asyncio.gather(
        *(_score(engine, release_id, text.token_ids) for text in probe.texts)
    )
    largest = 0.0
    reasons = []
    for number, (text, found) in enumerate(zip(probe.texts, scored, strict=True), start=1):
        pairs = list(zip_longest(text.logprobs, found, fillvalue=math.nan))
        differences = [
            abs(there - here) if math.isfinite(there) and math.isfinite(here) else math.inf
            for there, here in pairs
        ]
        worst = max(differences, default=0.0)
        largest = max(largest, worst)
        if worst > bound:
            place = differences.index(worst)
            there, here = pairs[place]
            reasons.append(
                # The first token of a text has no logprob, so the first logprob is token 2's.
                f"probe text {number}, token {place + 2}: logprob {here:.5f} instead of "
                f"{there:.5f}; they may differ by at most {bound:g}"
            )
    return ProbeResult(max_difference=largest, reasons=tuple(reasons))


async def _score(engine: Engine, release_id: str, token_ids: tuple[int, ...]) -> list[float]:
    generation = Generation(prompt=token_ids, max_tokens=0, temperature=0.0, num_prompt_logprobs=0)
    logprobs: list[float] = []
    async for step in engine.generate(release_id, generation):
        logprobs += [each.logprob for each in step.prompt_logprobs or ()]
    return logprobs
