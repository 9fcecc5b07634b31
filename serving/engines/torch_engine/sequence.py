"""`EngineSequence`: one generation in the engine."""

import asyncio
import random
import time
from collections.abc import Callable

from serving.engine import EngineError, Generation, Step, TokenLogprob, Waits
from serving.engines.torch_engine.logits_processor import LogitsProcessor
from serving.engines.torch_engine.slot_allocator import Slot

Uniform = Callable[[], float]
"""Returns the next random number in [0, 1) of one sequence."""

_unseeded = random.Random()


class EngineSequence:
    """Used by the step loop's thread only. Exceptions: any thread may set `is_cancelled`, and
    `events` belongs to the event loop's thread."""

    def __init__(
        self, release_id: str, generation: Generation, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.release_id = release_id
        self.generation = generation
        self.loop = loop
        self.events: asyncio.Queue[Step | EngineError] = asyncio.Queue()
        """Only the event loop's thread may put events into this queue."""
        self.is_cancelled = False
        self.arrival = 0
        """The sequence's number, in the order in which the sequences of its release arrived."""
        self.slot: Slot | None = None
        """None while the sequence waits and after it has ended."""
        self._submitted = time.perf_counter()
        self._admitted: float | None = None
        self._num_preemptions = 0
        """Since the last step."""
        self.num_cached_tokens = 0
        """The number of prompt tokens that were found in the prefix cache."""
        self.output: list[int] = []
        self._gathered: list[int] = []
        """The last tokens of `output`, which have not been handed over yet."""
        self._logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob] | None = (
            None if generation.num_prompt_logprobs is None else []
        )
        """None if they were not requested, and after they have been handed over."""
        self.stop_ids = frozenset(generation.stop_token_ids)
        self.logits_processor = LogitsProcessor(generation, self.stop_ids)
        self._random: random.Random | None = None

    @property
    def uniform(self) -> Uniform:
        """The generator of this sequence's random numbers. A sequence with a seed has its own. It
        is made when the first number is needed, because it takes 2.5 KB."""
        seed = self.generation.seed
        if seed is None:
            return _unseeded.random
        if self._random is None:
            # `Random` ignores the sign of a seed.
            self._random = random.Random(seed % (1 << 64))
        return self._random.random

    @property
    def tokens(self) -> tuple[int, ...]:
        """The prompt and the output."""
        prompt = self.generation.prompt
        return (*prompt, *self.output) if self.output else prompt

    def begin_prefill(self, slot: Slot) -> None:
        """Take the slot, for the first time or after a preemption."""
        self.slot = slot
        if self._admitted is None:
            self._admitted = time.perf_counter()
        if not self.output:
            self.num_cached_tokens = slot.length

    def reset_for_preemption(self) -> None:
        """Forget the slot. The output stays, and prompt logprobs will be computed again."""
        self.slot = None
        self._num_preemptions += 1
        if self.prompt_logprobs is not None:
            self.prompt_logprobs.clear()

    def add(self, token_id: int, logprob: TokenLogprob | None, context: int) -> str | None:
        """Add a new token. Returns the finish reason if this token is the last one, else None."""
        self.output.append(token_id)
        self._gathered.append(token_id)
        if logprob is not None:
            self._logprobs.append(logprob)
        if token_id in self.stop_ids and len(self.output) >= self.generation.min_tokens:
            return "stop"
        if self.logits_processor.add(token_id):
            return "stop"
        total = len(self.generation.prompt) + len(self.output)
        if len(self.output) >= self.generation.max_tokens or total >= context:
            return "length"
        return None

    def take_step(self, finish_reason: str | None) -> Step | None:
        """The step that must be handed over now, or None if more tokens are gathered first."""
        is_first = len(self._gathered) == len(self.output)
        is_full = len(self._gathered) >= self.generation.max_step_tokens
        if not (is_first or is_full or finish_reason is not None):
            return None
        scored, self.prompt_logprobs = self.prompt_logprobs, None
        step = Step(
            token_ids=tuple(self._gathered),
            logprobs=tuple(self._logprobs),
            prompt_logprobs=None if scored is None else tuple(scored),
            finish_reason=finish_reason,
            num_cached_tokens=self.num_cached_tokens if is_first else 0,
            waits=self._waits() if is_first else None,
            num_preemptions=self._num_preemptions,
        )
        self._num_preemptions = 0
        self._gathered.clear()
        self._logprobs.clear()
        return step

    def _waits(self) -> Waits:
        assert self._admitted is not None
        return Waits(
            queue_seconds=self._admitted - self._submitted,
            prefill_seconds=time.perf_counter() - self._admitted,
        )
