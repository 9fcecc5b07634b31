"""What a step computes of the prompts, and at what cost in memory."""

import asyncio
from collections.abc import Iterator

import pytest
import torch

from serving.engine import EngineError, Generation, Step
from serving.engines.settings import TorchEngineSettings
from serving.engines.torch_engine import scheduler as scheduler_module
from serving.engines.torch_engine.scheduler import Scheduler
from serving.engines.torch_engine.sequence import EngineSequence
from serving.engines.torch_engine.slots import Batch, KvCacheSize

VOCAB = 32


class Runner:
    """Every logit is 0. Remembers the batches."""

    vocab_size = VOCAB
    cache_size = KvCacheSize(
        num_slots=8, num_blocks=80, block_tokens=16, block_bytes=100, context=160
    )

    slots = ()

    def __init__(self) -> None:
        self.batches: list[Batch] = []

    def forward(self, batch: Batch) -> torch.Tensor:
        self.batches.append(batch)
        num_rows = sum(each.num_wanted for each in batch.chunks)
        return torch.zeros(len(batch.slots) + num_rows, VOCAB)


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


def test_logits_of_prompts_take_no_more_memory_in_a_step_than_is_allowed(
    loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler_module, "_PROMPT_LOGITS_BYTES", 40 * 4 * VOCAB)
    runner = Runner()
    scheduler = Scheduler(runner, TorchEngineSettings())
    answers: dict[EngineSequence, list[Step | EngineError]] = {}
    for number in range(6):
        scored = number % 3 != 2
        generation = Generation(
            prompt=tuple(range(number, number + 25)) * 3,
            max_tokens=3,
            temperature=0.0,
            num_prompt_logprobs=0 if scored else None,
        )
        sequence = EngineSequence("r000001-00000000", generation, loop)
        scheduler.submit(sequence)
        answers[sequence] = []
    while not scheduler.is_idle:
        for sequence, event in scheduler.step(num_schedulers=1):
            answers[sequence].append(event)
    num_rows = [
        sum(each.num_wanted for each in batch.chunks if each.num_wanted == len(each.token_ids))
        for batch in runner.batches
    ]
    assert max(num_rows) == 40
    assert sum(num_rows) == 4 * 75
    for sequence, (first, *_) in answers.items():
        assert isinstance(first, Step)
        is_scored = sequence.generation.num_prompt_logprobs is not None
        assert len(first.prompt_logprobs or ()) == (74 if is_scored else 0)
