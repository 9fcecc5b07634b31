"""Tiny networks with clear greedy choices, as real releases and changed ones, and ways to ask an
engine."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig

from serving.engine import Generation, Step
from serving.engines.settings import TorchEngineSettings
from serving.engines.torch_engine.engine import TorchEngine
from serving.engines.torch_engine.generic import TransformersRunner
from serving.engines.torch_engine.sequence import EngineSequence
from serving.weights.publish import publish_state_dict
from serving.weights.release import Release, read_header

VOCAB = 211
COMMON = {
    "vocab_size": VOCAB,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
"""What all tiny networks have."""
SHAPE = {
    **COMMON,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
_MIN_MARGIN = 2e-4

# Parity needs no speed, and other tests may run beside these.
torch.set_num_threads(1)


@dataclass(frozen=True, kw_only=True)
class Published:
    network: Any
    release: Release
    folder: Path

    @property
    def id(self) -> str:
        return self.release.id


def llama_config(**changes: Any) -> LlamaConfig:
    return LlamaConfig(**{**SHAPE, "tie_word_embeddings": False, **changes})


def build(config: PreTrainedConfig, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(seed)
    network: nn.Module = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    # Biases and norms start as constants, which would hide that they are applied wrongly.
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
                assert name
    return network


def publish(network: Any, home: Path, **options: Any) -> Published:
    files = home / "files"
    files.mkdir(parents=True, exist_ok=True)
    network.config.architectures = [type(network).__name__]
    network.config.save_pretrained(files)
    release = publish_state_dict(
        home / "releases", network.state_dict(keep_vars=True), files_dir=files, **options
    )
    return Published(network=network, release=release, folder=home / "releases" / release.id)


Change = Callable[[dict[str, torch.Tensor]], None]


@pytest.fixture
def first(tmp_path: Path) -> Published:
    return publish(build(llama_config(tie_word_embeddings=True)), tmp_path)


def changed(network: Any, home: Path, change: Change, **options: Any) -> Published:
    other = build(network.config, dtype=network.dtype)
    other.load_state_dict(network.state_dict())
    with torch.no_grad():
        change(dict(other.named_parameters()))
    return publish(other, home, **options)


def nudge(*names: str) -> Change:
    def change(parameters: dict[str, torch.Tensor]) -> None:
        for name in names:
            parameters[name].mul_(-1.3)

    return change


def flip(published: Published, name: str) -> None:
    """One bit of a tensor on disk; sizes, header and manifest stay."""
    entry = published.release.tensors[name]
    path = published.folder / entry.file
    content = bytearray(path.read_bytes())
    content[read_header(path)[name].begin] ^= 1
    path.write_bytes(content)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


@asynccontextmanager
async def engine_with(*published: Published, **settings: Any) -> AsyncIterator[TorchEngine]:
    settings.setdefault("num_threads", 1)
    settings.setdefault("kv_cache_bytes", 64 << 20)
    engine = TorchEngine(TorchEngineSettings(**settings))
    try:
        for one in published:
            await engine.stage(one.release, one.folder)
            await engine.commit(one.id)
        yield engine
    finally:
        await engine.close()


def greedy(prompt: Iterable[int], max_tokens: int = 12, **changes: Any) -> Generation:
    return Generation(
        prompt=tuple(prompt), max_tokens=max_tokens, **{"temperature": 0.0, **changes}
    )


def sequence(
    *, prompt: tuple[int, ...] = (4, 4, 2), output: tuple[int, ...] = (), **settings: Any
) -> EngineSequence:
    """One that no engine computes."""
    loop = asyncio.new_event_loop()
    loop.close()
    generation = Generation(prompt=prompt, max_tokens=9, **settings)
    made = EngineSequence("r000001-00000000", generation, loop)
    made.output.extend(output)
    return made


async def ask(engine: TorchEngine, release_id: str, generation: Generation) -> list[Step]:
    return [step async for step in engine.generate(release_id, generation)]


async def ask_all(
    engine: TorchEngine, release_id: str, generations: Iterable[Generation]
) -> list[list[int]]:
    answers = await asyncio.gather(*(ask(engine, release_id, g) for g in generations))
    return [tokens(steps) for steps in answers]


def recorded_batches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of each forward pass of a network of `transformers` from now on, the number of sequences."""
    sizes: list[int] = []
    read = TransformersRunner._read

    def remember(runner: TransformersRunner, slots: Sequence[int], *arguments: Any) -> Tensor:
        sizes.append(len(slots))
        return read(runner, slots, *arguments)

    monkeypatch.setattr(TransformersRunner, "_read", remember)
    return sizes


def tokens(steps: list[Step]) -> list[int]:
    return [token_id for step in steps for token_id in step.token_ids]


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, VOCAB, (length,), generator=generator).tolist())


def expected(network: Any, prompt: tuple[int, ...], max_tokens: int = 12) -> list[int]:
    """What `transformers` generates, checked to be clear: no choice hangs on the last bits."""
    found, margin = _generated(network, prompt, max_tokens)
    assert margin > _MIN_MARGIN, "the fixture's choice is too close"
    return found


def clear_prompt(networks: Sequence[Any], length: int, max_tokens: int) -> tuple[int, ...]:
    """A prompt for which the answers of all these networks are clear. Random weights differ between
    processors, so no prompt is clear on all machines."""
    for seed in range(length, length + 100):
        chosen = prompt(length, seed=seed)
        if all(_generated(each, chosen, max_tokens)[1] > _MIN_MARGIN for each in networks):
            return chosen
    raise AssertionError(f"no prompt of {length} tokens is clear")


@torch.inference_mode()
def _generated(network: Any, prompt: tuple[int, ...], max_tokens: int) -> tuple[list[int], float]:
    """The greedy answer, and by how much the best token beats the second one at the closest
    choice."""
    answer = network.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=max_tokens,
        do_sample=False,
        output_scores=True,
        return_dict_in_generate=True,
        pad_token_id=0,
    )
    best = torch.stack(answer.scores)[:, 0].topk(2).values
    found: list[int] = answer.sequences[0, len(prompt) :].tolist()
    return found, float((best[:, 0] - best[:, 1]).min())
