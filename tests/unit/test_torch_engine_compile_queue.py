"""Grammars wait for the thread that compiles them, and leave nothing behind."""

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from serving.engine import GenerationRefused, Grammar
from serving.engines.torch_engine import grammars
from serving.engines.torch_engine.grammars import Grammars
from tests.torch_engine_changes import until
from tests.torch_engine_fixtures import Published
from tests.unit.test_torch_engine_grammars import NETWORK, with_tokenizer


@dataclass
class Compiler:
    """Compiles grammars, but waits at the beginning of each one until `gate` is set."""

    published: Published
    grammars: Grammars
    begun: list[str] = field(default_factory=list)
    gate: threading.Event = field(default_factory=threading.Event)

    def begin(self, text: str) -> Any:
        grammar = Grammar(kind="regex", text=text, param="structured_outputs")
        release, folder = self.published.release, self.published.folder
        return asyncio.ensure_future(
            self.grammars.begin(release, folder, NETWORK["vocab_size"], grammar)
        )


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiler]:
    made = Compiler(with_tokenizer(tmp_path, seed=0), Grammars())
    original = grammars.grammar_from

    def waits(kind: Any, text: str) -> str:
        made.begun.append(text)
        assert made.gate.wait(30)
        return original(kind, text)

    monkeypatch.setattr(grammars, "grammar_from", waits)
    yield made
    made.gate.set()
    made.grammars.close()


def test_a_grammar_that_nobody_waits_for_is_not_compiled(compiler: Compiler) -> None:
    async def scenario() -> None:
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

    asyncio.run(scenario())
    assert compiler.begun == ["a", "c", "d", "b"]


def test_a_refusal_is_remembered(compiler: Compiler) -> None:
    async def scenario() -> None:
        for _ in range(2):
            with pytest.raises(GenerationRefused, match="cannot be compiled"):
                await compiler.begin("(")

    compiler.gate.set()
    asyncio.run(scenario())
    assert compiler.begun == ["("]
