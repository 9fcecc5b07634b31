"""`Scheduler`: decides which sequences of one release run, and what the next step computes."""

import time
from collections import deque
from itertools import count

from torch import Tensor

from serving.engine import EngineError, Step, TokenLogprob
from serving.engines.settings import TorchEngineSettings
from serving.engines.torch_engine.sampling import logprobs, sample
from serving.engines.torch_engine.sequence import EngineSequence
from serving.engines.torch_engine.slots import (
    COPIED_PER_PREFILLED,
    Batch,
    Chunk,
    Runner,
    Slot,
    SlotAllocator,
)

_MIN_PREFILL_TOKENS = 16
_MAX_STEPS_AT_ONCE = 10
"""A prefill takes at most this many `step_seconds`, however many sequences wait."""
_PROMPT_LOGITS_BYTES = 64 << 20
"""The most memory that a step takes for the logits of prompt tokens."""

Event = tuple[EngineSequence, Step | EngineError]


class Scheduler:
    """Used by the step loop's thread only. Other threads may read `kv_cache_usage`, `is_idle` and
    `untouched_bytes`.

    A sequence waits, then prefills its tokens into a slot, then decodes. If there is no memory for
    the next token of a sequence, the newest sequence is preempted: it loses its memory, waits
    again, and later prefills its prompt and its output. So the oldest sequence always continues.
    """

    def __init__(self, runner: Runner, settings: TorchEngineSettings) -> None:
        self._runner = runner
        self._settings = settings
        self._allocator = SlotAllocator(runner)
        self._waiting: deque[EngineSequence] = deque()
        self._decoding: list[EngineSequence] = []
        self._prefilling: list[EngineSequence] = []
        """In a step, those with a chunk. Between steps, at most one: a long prompt."""
        self._events: list[Event] = []
        """The events of the current step. If it fails, `fail` still returns those of sequences that
        have ended in it."""
        self._max_scored_tokens = max(1, _PROMPT_LOGITS_BYTES // (4 * runner.vocab_size))
        self._arrivals = count()
        self._seconds_per_prompt_token = 0.0
        self._seconds_without_prefill = 0.0

    def submit(self, sequence: EngineSequence) -> None:
        sequence.arrival = next(self._arrivals)
        self._waiting.append(sequence)

    @property
    def kv_cache_usage(self) -> float:
        return self._allocator.usage

    @property
    def is_idle(self) -> bool:
        return not (self._waiting or self._decoding or self._prefilling)

    @property
    def untouched_bytes(self) -> int:
        """The memory that the KV cache may still take."""
        return self._allocator.num_free * self._runner.cache_size.block_bytes

    def step(self, *, num_schedulers: int) -> list[Event]:
        """Compute one step. Returns the new events and the sequences that they belong to.

        `num_schedulers` schedulers take turns, this one included. The decoding sequences of each
        one wait for the prefills of all, so each prefills less if there are more.
        """
        self._drop_cancelled()
        if self.is_idle:
            return []
        self._grow_or_preempt()
        chunks = self._plan_prefill(self._prefill_budget(num_schedulers))
        decoding = sorted(self._decoding, key=lambda sequence: _slot(sequence).number)
        slots = [_slot(sequence) for sequence in decoding]
        batch = Batch(
            slots=[slot.number for slot in slots],
            token_ids=[sequence.output[-1] for sequence in decoding],
            lengths=[slot.length for slot in slots],
            chunks=chunks,
        )
        started = time.perf_counter()
        logits = self._runner.forward(batch)
        self._learn_speed(batch, time.perf_counter() - started)
        for slot in slots:
            slot.length += 1
        self._finish_step(decoding, chunks, logits)
        return self._take_events()

    def fail(self, error: EngineError) -> list[Event]:
        """Remove every sequence, after an error in `step`. Returns `error` as an event for each of
        them, after the events of the step that failed."""
        for sequence in (*self._decoding, *self._prefilling):
            self._allocator.free(_slot(sequence))
        everyone = [*self._decoding, *self._prefilling, *self._waiting]
        self._decoding, self._prefilling = [], []
        self._waiting.clear()
        self._events.extend((sequence, error) for sequence in everyone)
        return self._take_events()

    def _take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _drop_cancelled(self) -> None:
        for running in (self._decoding, self._prefilling):
            for sequence in [sequence for sequence in running if sequence.is_cancelled]:
                running.remove(sequence)
                self._cache_slot(sequence)
        if any(sequence.is_cancelled for sequence in self._waiting):
            self._waiting = deque(s for s in self._waiting if not s.is_cancelled)

    def _cache_slot(self, sequence: EngineSequence) -> None:
        self._allocator.cache(_slot(sequence), sequence.tokens)
        sequence.slot = None

    def _grow_or_preempt(self) -> None:
        """Get memory for the next token of each decoding sequence, the oldest sequence first."""
        for sequence in sorted(self._decoding, key=_arrival):
            while (slot := sequence.slot) and not self._allocator.grow(slot, slot.length + 1):
                self._preempt(max((*self._decoding, *self._prefilling), key=_arrival))

    def _preempt(self, sequence: EngineSequence) -> None:
        running = self._decoding if sequence in self._decoding else self._prefilling
        running.remove(sequence)
        self._allocator.free(_slot(sequence))
        sequence.reset_for_preemption()
        self._waiting.appendleft(sequence)

    def _plan_prefill(self, budget: int) -> list[Chunk]:
        """A chunk for each sequence in `_prefilling`, after waiting sequences have been moved to
        it. Only the last chunk may end before its sequence is prefilled completely."""
        chunks: list[Chunk] = []
        while budget > 0:
            if len(chunks) == len(self._prefilling):
                if not self._admit():
                    break
                copied = _slot(self._prefilling[-1]).num_copied
                budget = max(1, budget - copied // COPIED_PER_PREFILLED)
            sequence = self._prefilling[len(chunks)]
            slot = _slot(sequence)
            if sequence.prompt_logprobs is not None:
                budget = min(budget, self._max_scored_tokens)
            unread = slot.tokens[slot.length : slot.length + budget]
            budget -= len(unread)
            is_last = slot.length + len(unread) == len(slot.tokens)
            chunks.append(
                Chunk(
                    slot=slot.number,
                    start=slot.length,
                    token_ids=unread,
                    num_wanted=int(is_last) if sequence.prompt_logprobs is None else len(unread),
                )
            )
        return chunks

    def _admit(self) -> bool:
        """Move the first waiting sequence to `_prefilling`. Returns False if no sequence waits, if
        the batch is full, or if the sequence gets no slot now."""
        num_running = len(self._decoding) + len(self._prefilling)
        if not self._waiting or num_running >= self._settings.max_batch:
            return False
        sequence = self._waiting[0]
        # `num_spare` leaves one block for each running sequence. Otherwise the next few tokens of
        # these sequences would preempt the new one.
        slot = self._allocator.allocate(
            sequence.tokens,
            num_spare=num_running,
            may_share=sequence.prompt_logprobs is None,
        )
        if slot is None:
            return False
        sequence.begin_prefill(slot)
        self._prefilling.append(self._waiting.popleft())
        return True

    def _prefill_budget(self, num_schedulers: int) -> int:
        """The largest number of prompt tokens for the next step.

        While sequences decode, a prefill may take `step_seconds` for each sequence that waits for
        its first token. If many wait, those that decode make one longer pause, instead of many
        steps in a small batch. If another scheduler runs, the two share one `step_seconds`. Until
        it is known how long one token takes, the limit is `_MIN_PREFILL_TOKENS`.
        """
        budget = self._settings.max_batch_tokens
        if not self._decoding and num_schedulers == 1:
            return budget
        fitting = 0
        if self._seconds_per_prompt_token > 0:
            seconds = self._settings.step_seconds / num_schedulers
            if num_schedulers == 1:
                seconds *= min(max(self._num_new(), 1), _MAX_STEPS_AT_ONCE)
            fitting = int(seconds / self._seconds_per_prompt_token)
        return min(budget, max(fitting, _MIN_PREFILL_TOKENS))

    def _num_new(self) -> int:
        """The number of sequences that could get their first token next: those in `_prefilling`,
        and the waiting ones for which the batch has room."""
        num_running = len(self._decoding) + len(self._prefilling)
        room = self._settings.max_batch - num_running
        return len(self._prefilling) + min(len(self._waiting), room)

    def _learn_speed(self, batch: Batch, seconds: float) -> None:
        num_tokens = sum(len(chunk.token_ids) for chunk in batch.chunks)
        if not num_tokens:
            self._seconds_without_prefill = _smooth(self._seconds_without_prefill, seconds)
        elif num_tokens >= _MIN_PREFILL_TOKENS:
            if batch.slots:
                # The prefill delays decoding sequences only by the time that a step without prefill
                # would not take. The number of decoding sequences changes between steps, so this is
                # an estimate, and at most half of the time is subtracted.
                seconds = max(seconds - self._seconds_without_prefill, seconds / 2)
            measured = seconds / num_tokens
            self._seconds_per_prompt_token = _smooth(self._seconds_per_prompt_token, measured)

    def _finish_step(
        self,
        decoding: list[EngineSequence],
        chunks: list[Chunk],
        logits: Tensor,
    ) -> None:
        """Hand out what the step has computed: logprobs of prompts, and next tokens. Sequences that
        get no further token end. `logits` is what `Runner.forward` returned."""
        sampled, rows = list(decoding), list(range(len(decoding)))
        row = len(decoding)
        ended: list[EngineSequence] = []
        for chunk, sequence in zip(chunks, list(self._prefilling), strict=True):
            slot = _slot(sequence)
            end = row + chunk.num_wanted
            if sequence.prompt_logprobs is not None:
                _score(sequence, chunk.start, sequence.prompt_logprobs, logits[row:end])
            row = end
            slot.length += len(chunk.token_ids)
            if slot.length < len(slot.tokens):
                continue
            self._prefilling.remove(sequence)
            self._decoding.append(sequence)
            is_full = slot.length >= self._runner.cache_size.context
            if sequence.generation.max_tokens == 0 or is_full:
                ended.append(sequence)
            else:
                sampled.append(sequence)
                rows.append(row - 1)
        if sampled:
            self._sample(sampled, logits if len(rows) == row else logits[rows])
        for sequence in ended:
            self._hand_over(sequence, "length")

    def _sample(self, sequences: list[EngineSequence], logits: Tensor) -> None:
        token_ids = sample(sequences, logits)
        found = _token_logprobs(sequences, token_ids, logits)
        for sequence, token_id in zip(sequences, token_ids, strict=True):
            if sequence.logits_processor.refusal is not None:
                self._events.append((sequence, sequence.logits_processor.refusal))
                self._finish(sequence)
                continue
            reason = sequence.add(token_id, found.get(sequence), self._runner.cache_size.context)
            self._hand_over(sequence, reason)

    def _hand_over(self, sequence: EngineSequence, finish_reason: str | None) -> None:
        if (step := sequence.take_step(finish_reason)) is not None:
            self._events.append((sequence, step))
        if finish_reason is not None:
            self._finish(sequence)

    def _finish(self, sequence: EngineSequence) -> None:
        self._decoding.remove(sequence)
        self._cache_slot(sequence)


def _smooth(known: float, measured: float) -> float:
    return 0.7 * known + 0.3 * measured if known else measured


def _slot(sequence: EngineSequence) -> Slot:
    assert sequence.slot is not None
    return sequence.slot


def _arrival(sequence: EngineSequence) -> int:
    return sequence.arrival


def _score(
    sequence: EngineSequence, start: int, scored: list[TokenLogprob], logits: Tensor
) -> None:
    """Append the logprobs of prompt tokens to `scored`. The first row of `logits` [tokens,
    vocabulary] was computed from token `start` of the prompt, and predicts token `start + 1`."""
    targets = sequence.generation.prompt[start + 1 : start + 1 + len(logits)]
    if targets:
        num_top = sequence.generation.num_prompt_logprobs or 0
        scored.extend(logprobs(targets, [num_top] * len(targets), logits[: len(targets)]))


def _token_logprobs(
    sequences: list[EngineSequence], token_ids: list[int], logits: Tensor
) -> dict[EngineSequence, TokenLogprob]:
    rows = [row for row, s in enumerate(sequences) if s.generation.num_logprobs is not None]
    if not rows:
        return {}
    num_top = [sequences[row].generation.num_logprobs or 0 for row in rows]
    found = logprobs([token_ids[row] for row in rows], num_top, logits[rows])
    return {sequences[row]: logprob for row, logprob in zip(rows, found, strict=True)}
