"""Compares what an engine computes with what a job has computed."""

import asyncio
import math
from itertools import zip_longest

from serving.engine import Engine, Generation
from serving.weights.release import Probe


async def measure_probe(
    engine: Engine, release_id: str, probe: Probe, bound: float
) -> tuple[float, list[str]]:
    """Compute the logprob of each token in each text of `probe`, given the tokens before it, and
    compare it with the logprob of the job. Returns the largest absolute difference (infinite if a
    logprob is not finite or is missing), and a reason for each text with one above `bound`.

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
    largest, reasons = 0.0, []
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
    return largest, reasons


async def _score(engine: Engine, release_id: str, token_ids: tuple[int, ...]) -> list[float]:
    generation = Generation(prompt=token_ids, max_tokens=0, temperature=0.0, num_prompt_logprobs=0)
    logprobs: list[float] = []
    async for step in engine.generate(release_id, generation):
        logprobs += [each.logprob for each in step.prompt_logprobs or ()]
    return logprobs
