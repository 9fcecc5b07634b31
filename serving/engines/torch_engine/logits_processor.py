"""Changes the logits before a token is chosen: forbids tokens, adds biases and applies penalties.
Each kind of change is one operation for all rows of a batch."""

from collections.abc import Collection, Sequence
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from serving.engine import Generation, GenerationRefused
from serving.engines.torch_engine.grammars import Bits, GrammarState, next_tokens

_Ids = NDArray[np.int64]
_Values = NDArray[np.float32]

# For each byte of `Bits`: what is added to the logits of its eight tokens.
_LOGITS_OF_BYTE = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), 0, -np.inf
).astype(np.float32)


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
