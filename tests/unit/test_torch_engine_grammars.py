"""Grammars inside the engine: bounds, dead ends, and what the other sequences notice of them."""

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from llguidance import LLMatcher, grammar_from

from serving.engine import Generation, GenerationRefused, Grammar, GrammarKind
from serving.engines.torch_engine import grammars
from serving.engines.torch_engine.grammars import GrammarState
from serving.engines.torch_engine.sequence import LogitsProcessor, process_logits
from tests.serving_fixtures import byte_tokenizer
from tests.torch_engine_fixtures import (
    Published,
    ask,
    ask_all,
    build,
    engine_with,
    llama_config,
    publish,
    tokens,
    until,
)

TOKENIZER = byte_tokenizer()
# More embeddings than the tokenizer has tokens, as many checkpoints have.
NETWORK = {"vocab_size": 300, "max_position_embeddings": 512}


@pytest.fixture
def published(tmp_path: Path) -> Published:
    return publish(build(llama_config(**NETWORK)), tmp_path)


def regex(text: str, **settings: Any) -> Generation:
    grammar = Grammar(kind="regex", text=text, param="structured_outputs")
    return Generation(
        prompt=(1, 2, 3), max_tokens=50, grammar=grammar, tokenizer=TOKENIZER, **settings
    )


async def test_a_dead_end_is_refused_and_the_others_go_on(published: Published) -> None:
    a, b = TOKENIZER.encode("ab").ids
    stuck = regex("aaab", allowed_token_ids=(a,))
    beside = Generation(prompt=(5, 6), max_tokens=30, temperature=0.0)
    seen: list[Any] = []
    async with engine_with(published, max_batch=2) as engine:
        alone = tokens(await ask(engine, published.id, beside))
        other = asyncio.create_task(ask(engine, published.id, beside))
        with pytest.raises(GenerationRefused, match="no token is left") as refused:
            async for step in engine.generate(published.id, stuck):
                seen += step.token_ids
        assert refused.value.param == "structured_outputs"
        # Its slot is free again.
        assert (await ask_all(engine, published.id, [regex("ab")]))[0] == [a, b]
        assert tokens(await other) == alone
    assert seen == [a, a, a]


async def test_unused_embeddings_are_never_chosen(published: Published) -> None:
    """What ends a grammar inside is an id that the network may have an embedding for."""
    asked = [regex("[a-z]{0,20}", seed=seed, stop_token_ids=(256,)) for seed in range(30)]
    async with engine_with(published) as engine:
        for found in await ask_all(engine, published.id, asked):
            assert max(found) <= 256


def following(text: str, tokenizer: Any) -> LogitsProcessor:
    """At the beginning of a text of this regular expression."""
    made = LogitsProcessor(regex(text), frozenset())
    matcher = LLMatcher(tokenizer, grammar_from("regex", text), log_level=0)
    made.grammar = GrammarState(matcher, tokenizer, "structured_outputs")
    return made


def test_allowed_tokens_beside_a_grammar_in_a_full_vocabulary() -> None:
    """The tokenizer of a grammar has one token more than the vocabulary, and so one word of bits
    more if the vocabulary fills its words."""
    full = byte_tokenizer()
    size = -(-full.get_vocab_size() // 32) * 32
    full.add_tokens([f"extra{number}" for number in range(size - full.get_vocab_size())])
    tokenizer = grammars._with_end(full, size)
    allowing = LogitsProcessor(
        Generation(prompt=(1,), max_tokens=9, allowed_token_ids=(5, 6)), frozenset()
    )
    constrained = following("a+", tokenizer)
    for processors in ([allowing], [allowing, constrained], [constrained, allowing], [allowing]):
        logits = torch.zeros(len(processors), size)
        process_logits(logits, processors, [[] for _ in processors])
        found = dict(zip(processors, logits, strict=True))
        assert found[allowing].isfinite().nonzero()[:, 0].tolist() == [5, 6]
        if constrained in found:
            words = [full.id_to_token(n) for n in found[constrained].isfinite().nonzero()[:, 0]]
            assert words == ["a"]


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        ("json_schema", '{"a":' * 20_000 + "1" + "}" * 20_000, "recursion limit"),
        # This fails only when the first tokens are looked for.
        ("grammar", "root ::= " + " | ".join(f'[a-z]+ "{n}"' for n in range(2500)), "Current row"),
    ],
)
async def test_what_is_too_complex_is_refused_before_the_first_step(
    published: Published, kind: GrammarKind, text: str, reason: str
) -> None:
    grammar = Grammar(kind=kind, text=text, param="structured_outputs")
    asked = Generation(prompt=(1,), max_tokens=3, grammar=grammar, tokenizer=TOKENIZER)
    async with engine_with(published) as engine:
        with pytest.raises(GenerationRefused, match=reason) as refused:
            await anext(engine.generate(published.id, asked))
        assert refused.value.param == "structured_outputs"


def test_a_grammar_that_costs_too_much_time_ends_its_own_sequence_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer = grammars._with_end(TOKENIZER, NETWORK["vocab_size"])
    slow, quick = (following("a+", tokenizer) for _ in range(2))
    clock = 0.0
    fill = grammars.fill_next_token_bitmask

    def fill_in_time(matcher: LLMatcher, bits: grammars.Bits, row: int) -> None:
        nonlocal clock
        fill(matcher, bits, row)
        clock += 0.043 if slow.grammar and matcher is slow.grammar.matcher else 0.001

    monkeypatch.setattr(grammars, "fill_next_token_bitmask", fill_in_time)
    monkeypatch.setattr(grammars.time, "thread_time", lambda: clock)
    num_masks = 0
    while slow.refusal is None:
        num_masks += 1
        process_logits(torch.zeros(2, NETWORK["vocab_size"]), [slow, quick], [[], []])
    assert num_masks == 25
    assert "takes too long" in str(slow.refusal)
    assert quick.refusal is None


@dataclass
class Compiler:
    """Compiles grammars, but waits at the beginning of each one until `gate` is set."""

    grammars: grammars.Grammars
    begun: list[str] = field(default_factory=list)
    gate: threading.Event = field(default_factory=threading.Event)

    def begin(self, text: str) -> Any:
        grammar = Grammar(kind="regex", text=text, param="structured_outputs")
        return asyncio.ensure_future(self.grammars.begin(TOKENIZER, NETWORK["vocab_size"], grammar))


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiler]:
    made = Compiler(grammars.Grammars())
    original = grammars.grammar_from

    def waits(kind: Any, text: str) -> str:
        made.begun.append(text)
        assert made.gate.wait(30)
        return original(kind, text)

    monkeypatch.setattr(grammars, "grammar_from", waits)
    yield made
    made.gate.set()
    made.grammars.close()


async def test_a_grammar_that_nobody_waits_for_is_not_compiled(compiler: Compiler) -> None:
    first = compiler.begin("a")
    await until(lambda: compiler.begun == ["a"])
    unwanted, wanted = compiler.begin("b"), compiler.begin("c")
    leaving, staying = compiler.begin("d"), compiler.begin("d")
    await asyncio.sleep(0)
    unwanted.cancel()
    leaving.cancel()
    await asyncio.wait({unwanted, leaving})
    compiler.gate.set()
    await asyncio.gather(first, wanted, staying)
    await compiler.begin("b")
    assert compiler.begun == ["a", "c", "d", "b"]


async def test_compiling_is_bounded_in_time(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(grammars, "_COMPILE_SECONDS", 0.0)
        with pytest.raises(GenerationRefused, match="not compiled within 0 s; simplify"):
            await compiler.begin("ab")
    compiler.gate.set()
    await compiler.begin("ab")
