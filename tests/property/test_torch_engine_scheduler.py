"""However sequences come, go and are cut into chunks, each is computed from its own tokens."""

import asyncio
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from serving.engine import EngineError, Generation, Step
from serving.engines.settings import TorchEngineSettings
from serving.engines.torch_engine import scheduler as scheduler_module
from serving.engines.torch_engine.scheduler import Scheduler
from serving.engines.torch_engine.sequence import EngineSequence
from serving.engines.torch_engine.slots import Batch, KvCacheSize

VOCAB = 13
CONTEXT = 40
MAX_SCORED = 10
"""How many tokens of prompts have their logits in memory at the same time."""


def next_token(tokens: list[int]) -> int:
    value = 1
    for token_id in tokens:
        value = (value * 31 + token_id + 7) % 10007
    return value % VOCAB


class RememberingRunner:
    """Slots that hold the tokens themselves, and complain of every slot used wrongly."""

    vocab_size = VOCAB

    def __init__(self, cache_size: KvCacheSize, max_tokens: int) -> None:
        self.cache_size = cache_size
        self.layer_slots = [self]
        self._max_tokens = max_tokens
        self.held: list[list[int]] = [[] for _ in range(cache_size.num_slots)]

    def forward(self, batch: Batch) -> torch.Tensor:
        used = [*batch.slots, *(chunk.slot for chunk in batch.chunks)]
        assert len(set(used)) == len(used) > 0
        assert list(batch.slots) == sorted(batch.slots)
        rows = []
        for slot, token_id, length in zip(batch.slots, batch.token_ids, batch.lengths, strict=True):
            assert len(self.held[slot]) == length < CONTEXT
            self.held[slot].append(token_id)
            rows.append(next_token(self.held[slot]))
        assert sum(len(chunk.token_ids) for chunk in batch.chunks) <= self._max_tokens
        for chunk in batch.chunks:
            read = self.held[chunk.slot]
            assert len(read) >= chunk.start
            del read[chunk.start :]
            found = []
            for token_id in chunk.token_ids:
                read.append(token_id)
                found.append(next_token(read))
            rows.extend(found[len(found) - chunk.num_wanted :])
        scored = [chunk.num_wanted for chunk in batch.chunks if chunk.num_wanted > 1]
        assert sum(scored) <= MAX_SCORED
        num_blocks = sum(self.cache_size.blocks(len(slot)) for slot in self.held)
        assert num_blocks <= self.cache_size.num_blocks
        return torch.nn.functional.one_hot(torch.tensor(rows, dtype=torch.long), VOCAB).float()

    def truncate(self, slot: int, length: int) -> None:
        del self.held[slot][length:]

    def copy(self, source: int, target: int, length: int) -> None:
        assert source != target
        assert len(self.held[source]) >= length
        self.held[target] = self.held[source][:length]


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@pytest.fixture(autouse=True, scope="module")
def little_memory_for_logits() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler_module, "_PROMPT_LOGITS_BYTES", MAX_SCORED * 4 * VOCAB)
        yield


SHARED = tuple(number % VOCAB for number in range(7, 7 + CONTEXT))

prompts = st.one_of(
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=CONTEXT).map(tuple),
    # Prompts that begin alike, some of which end where others go on.
    st.builds(
        lambda shared, own: (SHARED[:shared] + tuple(own))[:CONTEXT],
        st.integers(1, CONTEXT),
        st.lists(st.integers(0, 2), max_size=3),
    ),
)
generations = st.builds(
    Generation,
    prompt=prompts,
    max_tokens=st.integers(0, 12),
    temperature=st.just(0.0),
    stop_token_ids=st.sampled_from([(), (3,), (5, 6)]),
    num_prompt_logprobs=st.sampled_from([None, 1]),
    max_step_tokens=st.integers(1, 5),
)
moves = st.lists(
    st.one_of(generations, st.integers(0, 9), st.just("step")), min_size=1, max_size=40
)


@st.composite
def cache_sizes(draw: st.DrawFn) -> KvCacheSize:
    block_tokens = draw(st.sampled_from([1, 4, 16]))
    least = -(-CONTEXT // block_tokens)
    return KvCacheSize(
        num_slots=draw(st.integers(1, 6)),
        num_blocks=draw(st.integers(least, 3 * least)),
        block_tokens=block_tokens,
        block_bytes=1,
        context=CONTEXT,
    )


@given(
    moves=moves,
    cache_size=cache_sizes(),
    max_batch=st.integers(1, 4),
    max_tokens=st.integers(1, 30),
)
def test_each_sequence_gets_the_tokens_it_would_get_alone(
    moves: list[Generation | int | str],
    cache_size: KvCacheSize,
    max_batch: int,
    max_tokens: int,
    loop: asyncio.AbstractEventLoop,
) -> None:
    settings = TorchEngineSettings(max_batch_tokens=max_tokens, max_batch=max_batch)
    runner = RememberingRunner(cache_size, max_tokens)
    scheduler = Scheduler(runner, settings)
    submitted: list[EngineSequence] = []
    answers: dict[EngineSequence, list[Step]] = {}

    def step() -> None:
        for sequence, event in scheduler.step(num_schedulers=1):
            assert not isinstance(event, EngineError)
            assert not sequence.is_cancelled
            answers[sequence].append(event)

    for move in moves:
        if isinstance(move, Generation):
            sequence = EngineSequence("r000001-00000000", move, loop)
            submitted.append(sequence)
            answers[sequence] = []
            scheduler.submit(sequence)
        elif isinstance(move, int):
            if move < len(submitted):
                submitted[move].is_cancelled = True
        else:
            step()
    for _ in range(1000):
        if scheduler.is_idle:
            break
        step()
    assert scheduler.is_idle
    for sequence, steps in answers.items():
        tokens, reason = alone(sequence.generation)
        found = [token_id for one in steps for token_id in one.token_ids]
        assert found == tokens[: len(found)]
        if not sequence.is_cancelled:
            assert found == tokens
            assert [one.finish_reason for one in steps[:-1]] == [None] * (len(steps) - 1)
            assert steps[-1].finish_reason == reason
            scored = steps[0].prompt_logprobs
            if sequence.generation.num_prompt_logprobs is None:
                assert scored is None
            else:
                assert scored is not None
                prompt = sequence.generation.prompt
                assert [one.token_id for one in scored] == list(prompt[1:])
                assert [one.top[0][0] for one in scored] == [
                    next_token(list(prompt[:end])) for end in range(1, len(prompt))
                ]


def alone(generation: Generation) -> tuple[list[int], str]:
    tokens = list(generation.prompt)
    while len(tokens) < min(len(generation.prompt) + generation.max_tokens, CONTEXT):
        tokens.append(next_token(tokens))
        if tokens[-1] in generation.stop_token_ids:
            return tokens[len(generation.prompt) :], "stop"
    return tokens[len(generation.prompt) :], "length"
