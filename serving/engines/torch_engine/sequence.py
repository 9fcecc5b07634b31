"""`Sequence`: one generation as the step loop knows it."""

import asyncio
import random

from serving.engine import EngineError, Generation, Step, TokenLogprob
from serving.engines.torch_engine.drawing import Uniform
from serving.engines.torch_engine.logits_processor import LogitsProcessor
from serving.engines.torch_engine.slot_allocator import Slot


class Sequence:
    """Owned by the step loop, except `is_cancelled`, which any thread may set."""

    def __init__(
        self,
        release_id: str,
        generation: Generation,
        loop: asyncio.AbstractEventLoop,
        *,
        vocab_size: int,
    ) -> None:
        self.release_id = release_id
        self.generation = generation
        self.loop = loop
        self.events: asyncio.Queue[Step | EngineError] = asyncio.Queue()
        """Filled on the event loop's thread only."""
        self.is_cancelled = False
        self.arrival = 0
        """Its place among the sequences of its release, in the order in which they came."""
        self.slot: Slot | None = None
        """Its room, once it is admitted and until it ends or has to wait again."""
        self.num_cached_tokens = 0
        """Of the prompt, found in the cache."""
        self.output: list[int] = []
        self._gathered: list[int] = []
        """The end of `output` that is not handed over yet."""
        self._logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob] | None = (
            None if generation.num_prompt_logprobs is None else []
        )
        self.stop_ids = frozenset(id for id in generation.stop_token_ids if id < vocab_size)
        self.logits_processor = LogitsProcessor(generation, self.stop_ids)
        self._random: random.Random | None = None

    @property
    def uniform(self) -> Uniform | None:
        """The random numbers of its seed, made when the first is needed: they take 2.5 KB. None
        without a seed."""
        seed = self.generation.seed
        if seed is None:
            return None
        if self._random is None:
            # `Random` would take a negative seed for its absolute value.
            self._random = random.Random(seed % (1 << 64))
        return self._random.random

    @property
    def tokens(self) -> tuple[int, ...]:
        """Prompt and output."""
        prompt = self.generation.prompt
        return (*prompt, *self.output) if self.output else prompt

    def reset_for_preemption(self) -> None:
        """Give up the slot; nothing of what was handed over, or is to be, is lost."""
        self.slot = None
        if self.prompt_logprobs is not None:
            self.prompt_logprobs.clear()

    def add(self, token_id: int, logprob: TokenLogprob | None, context: int) -> str | None:
        """Take a new token; the reason why it is the last one, or None."""
        self.output.append(token_id)
        self._gathered.append(token_id)
        if logprob is not None:
            self._logprobs.append(logprob)
        if token_id in self.stop_ids and len(self.output) >= self.generation.min_tokens:
            return "stop"
        if self.logits_processor.take(token_id):
            return "stop"
        total = len(self.generation.prompt) + len(self.output)
        if len(self.output) >= self.generation.max_tokens or total >= context:
            return "length"
        return None

    def take_step(self, finish_reason: str | None) -> Step | None:
        """What is to be handed over now; None while tokens are gathered."""
        is_first = len(self._gathered) == len(self.output)
        is_full = len(self._gathered) >= self.generation.max_step_tokens
        if not (is_first or is_full or finish_reason is not None):
            return None
        step = Step(
            token_ids=tuple(self._gathered),
            logprobs=tuple(self._logprobs),
            prompt_logprobs=self.take_prompt_logprobs(),
            finish_reason=finish_reason,
            num_cached_tokens=self.num_cached_tokens if is_first else 0,
        )
        self._gathered.clear()
        self._logprobs.clear()
        return step

    def take_scores(self) -> Step:
        """The only step of a sequence that generates nothing."""
        return Step(
            prompt_logprobs=self.take_prompt_logprobs(),
            finish_reason="length",
            num_cached_tokens=self.num_cached_tokens,
        )

    def take_prompt_logprobs(self) -> tuple[TokenLogprob, ...] | None:
        """Once; None after that, and where nobody asked."""
        found, self.prompt_logprobs = self.prompt_logprobs, None
        return None if found is None else tuple(found)
