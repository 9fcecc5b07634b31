"""Grammars compiled for a release's tokenizer by llguidance, and where a sequence is in one."""

import asyncio
import json
from collections import OrderedDict
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, grammar_from
from numpy.typing import NDArray
from tokenizers import AddedToken

from serving.engine import GenerationRefused, Grammar
from serving.errors import ReleaseError
from serving.tokenizer import load_tokenizer, tokenizer_files
from serving.weights.release import Release

Bits = NDArray[np.int32]
"""[rows, words]: a bit for each token of the vocabulary, the lowest bit first."""

_COMPILE_SECONDS = 10.0
_MAX_CACHED = 32
_MAX_REASON_CHARS = 300
_END = "<|end of a text that follows a grammar|>"

# Limits of size and, as fuel, of time: for the grammar, and for each token.
_LIMITS = LLParserLimits(
    max_grammar_size=500_000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    verbose_errors=False,
)


class GrammarState:
    """Where one sequence is in its grammar."""

    def __init__(self, matcher: LLMatcher, tokenizer: LLTokenizer, param: str) -> None:
        self.matcher = matcher
        self.tokenizer = tokenizer
        self.param = param

    def copy(self) -> "GrammarState":
        return GrammarState(self.matcher.deep_copy(), self.tokenizer, self.param)

    def take(self, token_id: int) -> bool:
        """Read a token; whether the text is complete and nothing can follow."""
        self.matcher.consume_token(token_id)
        return bool(self.matcher.is_stopped() and not self.matcher.is_error())

    @property
    def may_end(self) -> bool:
        return bool(self.matcher.is_accepting())

    @property
    def fault(self) -> str | None:
        """Why there is no next token; None where there is one."""
        return _one_line(self.matcher.get_error()) if self.matcher.is_error() else None


class Grammars:
    """Used on the event loop; a thread of its own compiles, one grammar after the other."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="torch-engine-grammar")
        self._tokenizers: dict[str, tuple[object, LLTokenizer]] = {}
        """By release, with what it was made of: releases whose files are equal share one."""
        self._compiled: OrderedDict[tuple[str, Grammar], asyncio.Future[GrammarState]] = (
            OrderedDict()
        )

    async def begin(
        self, release: Release, folder: Path, vocab_size: int, grammar: Grammar
    ) -> GrammarState:
        """A state at the beginning of the text.

        Raises GenerationRefused for a grammar that cannot be compiled, within bounds of time and
        size, or not for this release's tokenizer.
        """
        key = (release.id, grammar)
        compiling = self._compiled.get(key)
        if compiling is None:
            compiling = asyncio.get_running_loop().run_in_executor(
                self._thread, self._compile, release, folder, vocab_size, grammar
            )
            # What fails is said to everybody who waits, if anybody still does.
            compiling.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._compiled[key] = compiling
            while len(self._compiled) > _MAX_CACHED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(key)
        try:
            # One that takes too long goes on for those that ask again.
            first = await asyncio.wait_for(asyncio.shield(compiling), _COMPILE_SECONDS)
        except TimeoutError:
            raise GenerationRefused(
                f"not compiled within {_COMPILE_SECONDS:g} s; simplify it", param=grammar.param
            ) from None
        return first.copy()

    def forget(self, release_id: str) -> None:
        self._tokenizers.pop(release_id, None)
        for key in [key for key in self._compiled if key[0] == release_id]:
            del self._compiled[key]

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    def _compile(
        self, release: Release, folder: Path, vocab_size: int, grammar: Grammar
    ) -> GrammarState:
        try:
            text = _as_guidance(grammar)
            tokenizer = self._tokenizer(release, folder, vocab_size)
        except (ReleaseError, ValueError) as error:
            raise GenerationRefused(_one_line(str(error)), param=grammar.param) from None
        matcher = LLMatcher(tokenizer, text, log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise GenerationRefused(
                f"cannot be compiled: {_one_line(matcher.get_error())}", param=grammar.param
            )
        return GrammarState(matcher, tokenizer, grammar.param)

    def _tokenizer(self, release: Release, folder: Path, vocab_size: int) -> LLTokenizer:
        if release.id in self._tokenizers:
            return self._tokenizers[release.id][1]
        files = {name: entry.sha256 for name, entry in tokenizer_files(release).items()}
        made_of = (files, vocab_size)
        same = [each for other, each in list(self._tokenizers.values()) if other == made_of]
        tokenizer = same[0] if same else _read_tokenizer(folder, vocab_size)
        self._tokenizers[release.id] = (made_of, tokenizer)
        return tokenizer


class NextTokens:
    """Which tokens may come next, for many sequences at once."""

    def __init__(self) -> None:
        self._executor: LLExecutor | None = None

    def of(self, states: Seq[GrammarState | None], vocab_size: int) -> Bits:
        """A row for each state, of one release all. Where there is none, every token may come."""
        num_tokens = max([vocab_size, *(each.tokenizer.vocab_size for each in states if each)])
        bits = np.full((len(states), (num_tokens + 31) // 32), -1, np.int32)
        found = [(state.matcher, row) for row, state in enumerate(states) if state]
        if found:
            if self._executor is None:
                self._executor = LLExecutor()
            self._executor.unsafe_compute_mask_ptr(
                found, bits.ctypes.data, bits.shape[1] * bits.itemsize, len(bits)
            )
        for row, state in enumerate(states):
            if state is not None:
                end = state.tokenizer.eos_token
                bits[row, end >> 5] &= ~np.left_shift(np.int32(1), np.int32(end & 31))
        return bits


def _read_tokenizer(folder: Path, vocab_size: int) -> LLTokenizer:
    """Raises ReleaseError, ValueError."""
    tokenizer = load_tokenizer(folder).tokenizer
    # What ends a sequence is the request's to say. The token that ends a text here is one that no
    # text has.
    tokenizer.add_special_tokens([AddedToken(_END, special=True)])
    end = tokenizer.get_vocab(with_added_tokens=True)[_END]
    return LLTokenizer(tokenizer.to_str(), n_vocab=max(vocab_size, end + 1), eos_token=[end])


def _as_guidance(grammar: Grammar) -> str:
    """Raises ValueError."""
    if grammar.kind == "json_object":
        return grammar_from("json_schema", '{"type": "object"}')
    if grammar.kind == "json_schema":
        schema = json.loads(grammar.text)
        if not isinstance(schema, dict | bool):
            raise ValueError("a JSON schema is an object")
        return grammar_from("json_schema", grammar.text)
    return grammar_from(grammar.kind, grammar.text)


def _one_line(message: str) -> str:
    """Of llguidance's messages, without what is meant for its authors."""
    lines = [line.strip() for line in message.replace("<non-verbose/>", "").splitlines()]
    return " ".join(line for line in lines if line)[:_MAX_REASON_CHARS]
