"""Compiles grammars for the server's tokenizer with llguidance, and tracks the state of a sequence
in its grammar."""

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer

from serving.engine import EngineError, GenerationRefused, Grammar

Bits = NDArray[np.int32]
"""[rows, words]: one bit for each token of the vocabulary, the lowest bit first. A set bit allows
the token."""

_COMPILE_SECONDS = 10.0
_MAX_CACHED = 32
_MAX_TOKENIZERS = 2
_MAX_REASON_CHARS = 300
_END = "<|end of a text that follows a grammar|>"

_USUAL_SECONDS = 0.002
"""The usual time for the mask of one token is much shorter."""
_LATE_SECONDS = 1.0
"""How much longer than `_USUAL_SECONDS` the masks of one sequence may take, all together. Every
sequence of the engine waits for each mask."""

# Limits for the whole grammar and for each token. The "fuel" limits the time of a mask.
_LIMITS = LLParserLimits(
    max_grammar_size=500_000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=50_000,
    step_max_items=10_000,
    max_lexer_states=50_000,
    verbose_errors=False,
)


@dataclass(slots=True, eq=False)
class GrammarState:
    """The state of one sequence in its grammar."""

    matcher: LLMatcher
    tokenizer: LLTokenizer
    param: str
    late: float = 0.0
    """How much longer than `_USUAL_SECONDS` the masks have taken so far, in processor time."""

    def copy(self) -> "GrammarState":
        return replace(self, matcher=self.matcher.deep_copy())

    def advance(self, token_id: int) -> bool:
        """Advance by one token. Returns True if the text is complete and no token can follow."""
        self.matcher.consume_token(token_id)
        return bool(self.matcher.is_stopped() and not self.matcher.is_error())

    def fill(self, bits: Bits, row: int) -> None:
        """Write the tokens that may come next into a row of `bits`."""
        started = time.thread_time()
        fill_next_token_bitmask(self.matcher, bits, row)
        self.late += max(0.0, time.thread_time() - started - _USUAL_SECONDS)
        end = self.tokenizer.eos_token
        bits[row, end >> 5] &= ~np.left_shift(np.int32(1), np.int32(end & 31))

    @property
    def may_end(self) -> bool:
        return bool(self.matcher.is_accepting())

    @property
    def fault(self) -> str | None:
        """The error after which no token can follow; None if there is none."""
        if self.matcher.is_error():
            return _one_line(self.matcher.get_error())
        if self.late > _LATE_SECONDS:
            return "it takes too long to find the tokens that may come next; simplify it"
        return None


class Grammars:
    """Call it on the event loop. One thread compiles the grammars, one after the other."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="torch-engine-grammar")
        self._with_end = lru_cache(_MAX_TOKENIZERS)(_with_end)
        self._compiled = lru_cache(_MAX_CACHED)(self._compile)

    async def begin(self, tokenizer: Tokenizer, vocab_size: int, grammar: Grammar) -> GrammarState:
        """The state at the beginning of the text. `vocab_size` is that of the network.

        Raises GenerationRefused if the grammar cannot be compiled for this tokenizer, or not within
        the limits of time and size. Raises EngineError if the engine is closed.
        """
        try:
            work = self._thread.submit(self._compiled, tokenizer, vocab_size, grammar)
            compiled = asyncio.wrap_future(work)
        except RuntimeError:  # the thread has been shut down
            raise EngineError("the engine was closed") from None
        try:
            done, _ = await asyncio.wait({compiled}, timeout=_COMPILE_SECONDS)
        finally:
            # If nobody waits any more, it does not begin. What has begun serves a later request.
            compiled.cancel()
        if not done:
            raise GenerationRefused(
                f"not compiled within {_COMPILE_SECONDS:g} s; simplify it", param=grammar.param
            )
        if compiled.cancelled():
            raise EngineError("the engine was closed")
        found = compiled.result()
        if isinstance(found, GenerationRefused):
            raise found.with_traceback(None)
        return found.copy()

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    def _compile(
        self, tokenizer: Tokenizer, vocab_size: int, grammar: Grammar
    ) -> GrammarState | GenerationRefused:
        """Returns a refusal, so that it is remembered too: it may have taken seconds."""
        try:
            text = grammar_from(grammar.kind, grammar.text)
            with_end = self._with_end(tokenizer, vocab_size)
        except ValueError as error:
            return GenerationRefused(_one_line(str(error)), param=grammar.param)
        matcher = LLMatcher(with_end, text, log_level=0, limits=_LIMITS)
        state = GrammarState(matcher, with_end, grammar.param)
        if fault := state.fault or _fault_at_first_token(state.copy()):
            return GenerationRefused(f"cannot be compiled: {fault}", param=grammar.param)
        return state


def next_tokens(states: Sequence[GrammarState | None], vocab_size: int) -> Bits:
    """The tokens that may come next: one row for each state, as wide as the vocabulary. The states
    must be of one release. Without a state, every token is allowed."""
    # A tokenizer may have more tokens than the vocabulary. llguidance writes all of them.
    num_tokens = max([vocab_size, *(each.tokenizer.vocab_size for each in states if each)])
    bits = allocate_token_bitmask(len(states), num_tokens)
    for row, state in enumerate(states):
        if state is not None:
            state.fill(bits, row)
    return bits[:, : (vocab_size + 31) // 32]


def _with_end(tokenizer: Tokenizer, vocab_size: int) -> LLTokenizer:
    """Raises ValueError."""
    # The request decides which tokens end the sequence. So llguidance gets an end token that no
    # text contains, and `next_tokens` never allows this token.
    copied = Tokenizer.from_str(tokenizer.to_str())
    copied.add_special_tokens([AddedToken(_END, special=True)])
    end = copied.get_vocab(with_added_tokens=True)[_END]
    return LLTokenizer(copied.to_str(), n_vocab=max(vocab_size, end + 1), eos_token=[end])


def _fault_at_first_token(state: GrammarState) -> str | None:
    """The fault that `state` gets with its first mask or token. Some grammars exceed the limits
    only there, and the step in which they do so delays all sequences."""
    bits = allocate_token_bitmask(1, state.tokenizer.vocab_size)
    state.fill(bits, 0)
    allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
    if state.fault is None and len(allowed):
        state.advance(int(allowed[0]))
    return state.fault


def _one_line(message: str) -> str:
    """A message of llguidance in one line, without the parts for llguidance's developers."""
    lines = [line.strip() for line in message.replace("<non-verbose/>", "").splitlines()]
    return " ".join(line for line in lines if line)[:_MAX_REASON_CHARS]
