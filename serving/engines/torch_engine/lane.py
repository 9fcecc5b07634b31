"""`Lane`: the sequences of one release: who has which slot, and what the next step computes."""

import time
from collections import deque

from torch import Tensor

from serving.engine import EngineError, Step, TokenLogprob
from serving.engines.torch_engine.runner import Batch, Chunk, Runner
from serving.engines.torch_engine.sampling import Sampler, logprobs
from serving.engines.torch_engine.sequence import Sequence
from serving.engines.torch_engine.settings import TorchEngineSettings

_LEAST_PROMPT_TOKENS = 16

Event = tuple[Sequence, Step | EngineError]


class Lane:
    """Used by the step loop's thread only.

    Slots are dense: the sequences that decode have 0, 1, …, and at most one, whose prompt is being
    read, has the next: so a step's keys and values are one view and never gathered.
    """

    def __init__(self, runner: Runner, sampler: Sampler, settings: TorchEngineSettings) -> None:
        self._runner = runner
        self._sampler = sampler
        self._settings = settings
        self._waiting: deque[Sequence] = deque()
        self._decoding: list[Sequence] = []
        self._reading: list[Sequence] = []
        self._seconds_per_prompt_token = 0.0

    def warm_up(self) -> None:
        self._runner.warm_up()

    def submit(self, sequence: Sequence) -> None:
        self._waiting.append(sequence)

    @property
    def is_idle(self) -> bool:
        return not (self._waiting or self._decoding or self._reading)

    def step(self, *, num_lanes: int) -> list[Event]:
        """Compute one step, and say what it brought to whom. `num_lanes` take turns, this one
        included: the streams of one wait for the prompts of all."""
        self._drop_cancelled()
        if self.is_idle:
            return []
        chunks = self._plan_prompts(self._prompt_budget(num_lanes))
        decoding = list(self._decoding)
        batch = Batch(
            token_ids=[sequence.output[-1] for sequence in decoding],
            lengths=[sequence.num_read for sequence in decoding],
            chunks=chunks,
        )
        started = time.perf_counter()
        logits = self._runner.forward(batch)
        self._learn_speed(batch, time.perf_counter() - started)
        for sequence in decoding:
            sequence.num_read += 1
        return self._finish_step(decoding, chunks, logits)

    def fail(self, error: EngineError) -> list[Event]:
        """Give up every sequence."""
        everyone = [*self._decoding, *self._reading, *self._waiting]
        self._decoding, self._reading = [], []
        self._waiting.clear()
        return [(sequence, error) for sequence in everyone]

    def _drop_cancelled(self) -> None:
        for sequence in [s for s in self._decoding if s.is_cancelled]:
            self._free(sequence)
        self._reading = [s for s in self._reading if not s.is_cancelled]
        if any(sequence.is_cancelled for sequence in self._waiting):
            self._waiting = deque(s for s in self._waiting if not s.is_cancelled)

    def _free(self, sequence: Sequence) -> None:
        """Take a decoding sequence's slot, and close the gap with the last ones."""
        slot = self._decoding.index(sequence)
        last = self._decoding.pop()
        end = len(self._decoding)
        if last is not sequence:
            self._decoding[slot] = last
            self._runner.move(end, slot, last.num_read)
        for sequence in self._reading:
            self._runner.move(end + 1, end, sequence.num_read)

    def _plan_prompts(self, budget: int) -> list[Chunk]:
        """A chunk for each of `_reading`, which takes in who waits; only the last may be left
        unfinished. Their slots follow those that decode."""
        chunks: list[Chunk] = []
        slot = len(self._decoding)
        while budget > 0 and slot < self._runner.num_slots:
            if len(chunks) == len(self._reading):
                if not self._waiting:
                    break
                self._reading.append(self._waiting.popleft())
            sequence = self._reading[len(chunks)]
            start, count = sequence.num_read, min(budget, sequence.num_unread)
            chunks.append(
                Chunk(
                    slot=slot,
                    start=start,
                    token_ids=sequence.generation.prompt[start : start + count],
                    wants=_wanted(sequence, is_last=count == sequence.num_unread),
                )
            )
            budget -= count
            slot += 1
        return chunks

    def _prompt_budget(self, num_lanes: int) -> int:
        """Prompt tokens for the next step: as many as this lane's share of `step_seconds` allows
        beside streams that run, few while it is not known how long one takes."""
        budget = self._settings.max_batch_tokens
        if not self._decoding and num_lanes == 1:
            return budget
        fitting = 0
        if self._seconds_per_prompt_token > 0:
            seconds = self._settings.step_seconds / num_lanes
            fitting = int(seconds / self._seconds_per_prompt_token)
        return min(budget, max(fitting, _LEAST_PROMPT_TOKENS))

    def _learn_speed(self, batch: Batch, seconds: float) -> None:
        count = sum(len(chunk.token_ids) for chunk in batch.chunks)
        if count >= _LEAST_PROMPT_TOKENS:
            measured, known = seconds / count, self._seconds_per_prompt_token
            self._seconds_per_prompt_token = measured if not known else 0.7 * known + 0.3 * measured

    def _finish_step(
        self,
        decoding: list[Sequence],
        chunks: list[Chunk],
        logits: Tensor,
    ) -> list[Event]:
        events: list[Event] = []
        sampled, rows = list(decoding), list(range(len(decoding)))
        row = len(decoding)
        scored: list[Sequence] = []
        for chunk, sequence in zip(chunks, self._reading, strict=True):
            count = len(chunk.token_ids)
            wanted = {"none": 0, "last": 1, "all": count}[chunk.wants]
            if sequence.prompt_logprobs is not None:
                _score(sequence, sequence.prompt_logprobs, logits[row : row + wanted])
            row += wanted
            sequence.num_read += count
            if sequence.num_unread:
                continue
            self._decoding.append(sequence)
            if sequence.generation.max_tokens == 0 or sequence.num_read >= self._runner.context:
                scored.append(sequence)
            else:
                sampled.append(sequence)
                rows.append(row - 1)
        self._reading = [sequence for sequence in self._reading if sequence.num_unread > 0]
        if sampled:
            events.extend(self._sample(sampled, logits if len(rows) == row else logits[rows]))
        for sequence in scored:
            self._free(sequence)
            scores = sequence.take_prompt_logprobs()
            events.append((sequence, Step(prompt_logprobs=scores, finish_reason="length")))
        return events

    def _sample(self, sequences: list[Sequence], logits: Tensor) -> list[Event]:
        token_ids = self._sampler.sample(sequences, logits)
        found = _token_logprobs(sequences, token_ids, logits)
        events: list[Event] = []
        for sequence, token_id in zip(sequences, token_ids, strict=True):
            if sequence.shape.refusal is not None:
                events.append((sequence, sequence.shape.refusal))
                self._free(sequence)
                continue
            reason = sequence.add(token_id, found.get(sequence), self._runner.context)
            if (step := sequence.take_step(reason)) is not None:
                events.append((sequence, step))
            if reason is not None:
                self._free(sequence)
        return events


def _wanted(sequence: Sequence, *, is_last: bool) -> str:
    if sequence.prompt_logprobs is not None:
        return "all"
    return "last" if is_last else "none"


def _score(sequence: Sequence, scored: list[TokenLogprob], logits: Tensor) -> None:
    """The logprobs of the prompt tokens that follow the rows just read."""
    start = sequence.num_read + 1
    targets = sequence.generation.prompt[start : start + len(logits)]
    if targets:
        num_top = sequence.generation.num_prompt_logprobs or 0
        scored.extend(logprobs(targets, [num_top] * len(targets), logits[: len(targets)]))


def _token_logprobs(
    sequences: list[Sequence], token_ids: list[int], logits: Tensor
) -> dict[Sequence, TokenLogprob]:
    rows = [row for row, s in enumerate(sequences) if s.generation.num_logprobs is not None]
    if not rows:
        return {}
    num_top = [sequences[row].generation.num_logprobs or 0 for row in rows]
    found = logprobs([token_ids[row] for row in rows], num_top, logits[rows])
    return {sequences[row]: logprob for row, logprob in zip(rows, found, strict=True)}
