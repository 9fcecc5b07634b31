"""`EngineSequence`: one generation in the engine. Its `LogitsProcessor` changes the logits before a
token is chosen: forbids tokens, adds biases and applies penalties. Each kind of change is one
operation for all rows of a batch."""

import asyncio
import random
import time
from collections.abc import Callable, Collection, Sequence
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from serving.engine import EngineError, Generation, GenerationRefused, Step, TokenLogprob, Waits
from serving.engines.torch_engine.grammars import Bits, GrammarState, next_tokens
from serving.engines.torch_engine.slots import Slot

Uniform = Callable[[], float]
"""Returns the next random number in [0, 1) of one sequence."""

_unseeded = random.Random()

_Ids = NDArray[np.int64]
_Values = NDArray[np.float32]

# For each byte of `Bits`: what is added to the logits of its eight tokens.
_LOGITS_OF_BYTE = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), 0, -np.inf
).astype(np.float32)


class EngineSequence:
    """Used by the step loop's thread only, once it was submitted. Exceptions: any thread may set
    `is_cancelled`, and `events` belongs to the event loop's thread."""

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


class LogitsProcessor:
    """The settings of one sequence that change its logits. It takes memory only from the first
    chosen token on, so a waiting sequence takes none."""

    def __init__(self, generation: Generation, stop_ids: frozenset[int]) -> None:
        self._generation = generation
        self._stop_ids = stop_ids
        self._token_counts: TokenCounts | None = None
        self._allowed: Bits | None = None
        self.grammar: GrammarState | None = None
        """The state in the grammar. If the generation has a grammar, this is set before the first
        token is chosen."""
        self.refusal: GenerationRefused | None = None
        """Why the sequence cannot continue; None while it can."""
        self.penalties = (
            generation.repetition_penalty,
            generation.frequency_penalty,
            generation.presence_penalty,
        )
        self.is_penalised = self.penalties != (1.0, 0.0, 0.0)
        self.is_constrained = bool(generation.grammar or generation.allowed_token_ids)
        self.is_plain = not (
            self.is_constrained
            or generation.logit_bias
            or (generation.min_tokens and stop_ids)
            or self.is_penalised
        )
        """Whether the logits need no change."""

    def add(self, token_id: int) -> bool:
        """Add a token that is not a stop token. Returns True if the grammar ends the text."""
        return self.grammar is not None and self.grammar.advance(token_id)

    def biases(self, output: list[int]) -> dict[int, float]:
        """Token id → what is added to its logit. After fewer than `min_tokens` tokens, the biases
        forbid the stop tokens."""
        biases = self._generation.logit_bias
        if len(output) < self._generation.min_tokens:
            biases = biases | dict.fromkeys(self._stop_ids, -np.inf)
        return biases

    def restrict(self, bits: Bits) -> None:
        """Clear the bits of tokens that are not allowed, in one row of `bits`. The row must hold
        the tokens that the grammar allows. If the text may end here, stop tokens are allowed too.
        """
        if self.grammar is not None and self.grammar.may_end:
            _set(bits, self._stop_ids)
        if self._generation.allowed_token_ids is not None:
            if self._allowed is None:
                self._allowed = np.zeros_like(bits)
                _set(self._allowed, self._generation.allowed_token_ids)
            bits &= self._allowed

    def refuse(self) -> None:
        """Set `refusal`, because no token is left to choose."""
        fault = None if self.grammar is None else self.grammar.fault
        param = "allowed_token_ids" if self.grammar is None else self.grammar.param
        self.refusal = GenerationRefused(
            fault or "no token is left that this field, allowed_token_ids and min_tokens allow",
            param=param,
        )

    def token_counts(self, output: list[int]) -> "TokenCounts":
        """Counts of all tokens in `output`. It must begin with the `output` of the last call."""
        if self._token_counts is None:
            looks_at_prompt = self._generation.repetition_penalty != 1.0
            self._token_counts = TokenCounts(self._generation.prompt if looks_at_prompt else ())
        self._token_counts.read(output)
        return self._token_counts


class TokenCounts:
    """How often each token was generated. It holds only tokens that occurred, not the whole
    vocabulary."""

    def __init__(self, prompt: tuple[int, ...]) -> None:
        seen = dict.fromkeys(prompt)
        self._place = {token_id: place for place, token_id in enumerate(seen)}
        self._ids = np.fromiter(seen, np.int64, len(seen))
        self._counts = np.zeros(len(seen), np.float32)
        self._num_read = 0

    @property
    def ids(self) -> _Ids:
        return self._ids[: len(self._place)]

    @property
    def counts(self) -> _Values:
        """How often each of `ids` is in the output. 0 for a token that only the prompt has."""
        return self._counts[: len(self._place)]

    def read(self, output: list[int]) -> None:
        for token_id in output[self._num_read :]:
            place = self._place.setdefault(token_id, len(self._place))
            if place == len(self._ids):
                room = max(64, len(self._ids))
                self._ids = np.concatenate([self._ids, np.zeros(room, np.int64)])
                self._counts = np.concatenate([self._counts, np.zeros(room, np.float32)])
            self._ids[place] = token_id
            self._counts[place] += 1
        self._num_read = len(output)


def process_logits(
    logits: Tensor, processors: Sequence[LogitsProcessor], outputs: Sequence[list[int]]
) -> None:
    """Change `logits` [rows, vocabulary] in place. If no token is left in a row, its processor gets
    a `refusal`, and all its logits become zero."""
    constrained = [row for row, each in enumerate(processors) if each.is_constrained]
    if constrained:
        _mask(logits, processors, constrained)
    _add_biases(logits, processors, outputs)
    _penalise(logits, processors, outputs)
    for row in constrained:
        each = processors[row]
        if (each.grammar and each.grammar.fault) or logits[row].amax() == -torch.inf:
            each.refuse()
            logits[row] = 0


def _mask(logits: Tensor, processors: Sequence[LogitsProcessor], rows: list[int]) -> None:
    vocab_size = logits.shape[1]
    bits = next_tokens([processors[row].grammar for row in rows], vocab_size)
    for number, row in enumerate(rows):
        processors[row].restrict(bits[number])
    added = _LOGITS_OF_BYTE.take(bits.view(np.uint8), axis=0).reshape(len(rows), -1)[:, :vocab_size]
    for number, row in enumerate(rows):
        logits[row] += torch.from_numpy(added[number])


def _add_biases(
    logits: Tensor, processors: Sequence[LogitsProcessor], outputs: Sequence[list[int]]
) -> None:
    found = [each.biases(output) for each, output in zip(processors, outputs, strict=True)]
    at = _places(logits, [np.fromiter(each, np.int64, len(each)) for each in found])
    values = np.fromiter(chain.from_iterable(each.values() for each in found), np.float32)
    logits.view(-1)[at] += torch.from_numpy(values)


def _penalise(
    logits: Tensor, processors: Sequence[LogitsProcessor], outputs: Sequence[list[int]]
) -> None:
    """The repetition penalty also counts tokens of the prompt (CTRL, arXiv:1909.05858). OpenAI's
    frequency and presence penalties count new tokens only."""
    no_counts = TokenCounts(())
    of_rows = [
        each.token_counts(output) if each.is_penalised else no_counts
        for each, output in zip(processors, outputs, strict=True)
    ]
    at = _places(logits, [each.ids for each in of_rows])
    if not len(at):
        return
    counts = torch.from_numpy(np.concatenate([each.counts for each in of_rows]))
    sizes = torch.tensor([len(each.ids) for each in of_rows])
    each_row = torch.tensor([each.penalties for each in processors])
    each_token = each_row.repeat_interleave(sizes, dim=0)
    repetition, frequency, presence = each_token.unbind(1)
    values = logits.view(-1)[at]
    values = torch.where(values > 0, values / repetition, values * repetition)
    logits.view(-1)[at] = values - frequency * counts - presence * (counts > 0)


def _places(logits: Tensor, ids_of_rows: Sequence[_Ids]) -> Tensor:
    """The indices of the rows' tokens in the flattened `logits`."""
    vocab_size = logits.shape[1]
    places = [row * vocab_size + ids for row, ids in enumerate(ids_of_rows) if len(ids)]
    whole = np.concatenate(places) if places else np.empty(0, np.int64)
    return torch.from_numpy(whole)


def _set(bits: Bits, token_ids: Collection[int]) -> None:
    """Set the bits of these tokens in one row."""
    ids = np.fromiter(token_ids, np.int64, len(token_ids))
    np.bitwise_or.at(bits.view(np.uint32), ids >> 5, np.uint32(1) << (ids & 31).astype(np.uint32))
