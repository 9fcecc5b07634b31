"""Computes the logprobs of a release's probe with the engine, and compares them with the logprobs
that the job recorded.

Only this comparison shows that the engine computes with all weights of the release. If the engine
only reports success, this is no proof.
"""

import asyncio
import math
from dataclasses import dataclass

from serving.engine import Engine, Generation
from serving.weights.release import Probe


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
        if len(found) != len(text.logprobs):
            largest = math.inf
            reasons.append(
                f"probe text {number}: {len(found)} logprobs instead of {len(text.logprobs)}"
            )
            continue
        differences = [
            abs(there - here) if math.isfinite(there) and math.isfinite(here) else math.inf
            for there, here in zip(text.logprobs, found, strict=True)
        ]
        worst = max(differences, default=0.0)
        largest = max(largest, worst)
        if worst > bound:
            place = differences.index(worst)
            reasons.append(
                # The first token of a text has no logprob, so the first logprob is token 2's.
                f"probe text {number}, token {place + 2}: logprob {found[place]:.5f} instead of "
                f"{text.logprobs[place]:.5f}; they may differ by at most {bound:g}"
            )
    return ProbeResult(max_difference=largest, reasons=tuple(reasons))


async def _score(engine: Engine, release_id: str, token_ids: tuple[int, ...]) -> list[float]:
    generation = Generation(prompt=token_ids, max_tokens=0, temperature=0.0, num_prompt_logprobs=0)
    logprobs: list[float] = []
    async for step in engine.generate(release_id, generation):
        logprobs += [each.logprob for each in step.prompt_logprobs or ()]
    return logprobs
