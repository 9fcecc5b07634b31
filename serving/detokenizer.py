"""Turns the tokens of a sequence into text while they arrive, and cuts the text at stop strings."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, islice

from serving.engine import Generation, Step
from serving.openai_schemas import SamplingRequest
from serving.tokenizer import REPLACEMENT, ReleaseTokenizer

_MAX_CHARACTER_BYTES = 4
"""A character has at most this many bytes in UTF-8. Because a token has at least one byte, this is
also the largest number of tokens that share a character."""
_MAX_WAITING_TOKENS = 16
"""If this many tokens wait for the end of a character, the text of all but the last few is
passed on."""
_NUM_PROMPT_TOKENS = 6
"""How many of the prompt's last tokens are decoded together with the first new tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenText:
    """A token and its place in the generated text."""

    token_id: int
    offset: int
    """The number of characters of generated text before the token."""
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Delta:
    """The part of a sequence that became final with one step of the engine. Text that may still
    become a stop string, or that may still change, is held back for a later delta."""

    text: str = ""
    tokens: tuple[TokenText, ...] = ()
    """The tokens whose text begins before the end of this delta, without the tokens of earlier
    deltas. Empty if the request asks for no logprobs."""
    num_tokens: int = 0
    """How many tokens the step generated, even if their text is held back."""
    step: Step
    """The step, for what the engine tells in it beside the tokens."""
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    """The stop string, or the id among the request's `stop_token_ids`, that ended the sequence."""


class TextReader:
    """Reads the steps of one sequence: turns tokens into text, cuts the text at a stop string, and
    finds the place of each token in the text."""

    def __init__(
        self, tokenizer: ReleaseTokenizer, generation: Generation, request: SamplingRequest
    ) -> None:
        self._detokenizer = Detokenizer(
            tokenizer, generation.prompt, skip_special_tokens=request.skip_special_tokens
        )
        self._includes_stop = request.include_stop_str_in_output
        self._stop_strings = StopStrings(request.stops, include=self._includes_stop)
        self._stop_ids = frozenset(generation.stop_token_ids)
        ends = () if request.ignore_eos else tokenizer.eos_token_ids
        self._request_stop_ids = self._stop_ids - set(ends)
        self._min_tokens = generation.min_tokens
        self._wants_logprobs = generation.num_logprobs is not None
        self._num_seen = 0
        self._num_chars = 0
        """Number of characters of detokenised text."""
        self._num_given = 0
        """Number of characters in all deltas so far."""
        self._held: list[TokenText] = []
        """Tokens whose text is not in a delta yet."""

    def read(self, step: Step) -> Delta:
        """The delta for `step`. If the delta has a `finish_reason`, the sequence has ended; do not
        read its further steps."""
        text = ""
        stop: str | int | None = None
        num_tokens = 0
        for position, token_id in enumerate(step.token_ids):
            num_tokens += 1
            self._num_seen += 1
            is_end = step.finish_reason == "stop" and position == len(step.token_ids) - 1
            if self._wants_logprobs:
                self._held.append(_token_text(step, position, token_id, self._num_chars))
            is_stop_token = is_end and token_id in self._stop_ids
            is_shown = self._includes_stop or not is_stop_token
            piece = self._detokenizer.add(token_id) if is_shown else ""
            self._num_chars += len(piece)
            safe, stop = self._stop_strings.add(piece, may_end=self._num_seen > self._min_tokens)
            text += safe
            if stop is not None:
                break
        finish_reason = step.finish_reason
        if finish_reason is not None and stop is None:
            safe, stop = self._stop_strings.add(
                self._detokenizer.flush(), may_end=self._num_seen > self._min_tokens
            )
            text += safe if stop is not None else safe + self._stop_strings.flush()
        is_cut = stop is not None
        if is_cut:
            finish_reason = "stop"
        elif finish_reason == "stop" and step.token_ids:
            last = step.token_ids[-1]
            stop = last if last in self._request_stop_ids else None
        self._num_given += len(text)
        gives_all = finish_reason is not None and not is_cut
        tokens = tuple(each for each in self._held if gives_all or each.offset < self._num_given)
        self._held = self._held[len(tokens) :]
        return Delta(
            text=text,
            tokens=tokens,
            num_tokens=num_tokens,
            step=step,
            finish_reason=finish_reason,
            stop_reason=stop,
        )


def _token_text(step: Step, position: int, token_id: int, offset: int) -> TokenText:
    if position >= len(step.logprobs):
        return TokenText(token_id=token_id, offset=offset)
    found = step.logprobs[position]
    return TokenText(token_id=token_id, offset=offset, logprob=found.logprob, top=found.top)


class Detokenizer:
    """Decodes the tokens of a sequence while they arrive, into pieces of text that do not change
    when more tokens arrive.

    There are two difficulties. First, the text of a token may depend on the tokens before it; for
    example, some tokenizers drop a space at the beginning of a text. So each piece is decoded
    together with the tokens of the previous piece. The first piece is decoded together with the
    last tokens of the prompt. The earlier tokens and the new tokens together are the *window*.

    Second, the bytes of one character may be spread over several tokens. So a piece that ends
    inside a character waits for the next tokens. If too many tokens wait, all of their text is
    passed on, except the last bytes, which may be the beginning of a character.
    """

    def __init__(
        self,
        tokenizer: ReleaseTokenizer,
        prompt: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
    ) -> None:
        """`prompt` are the token ids before the sequence. Their text is not part of the pieces."""
        self._decode = partial(tokenizer.decode, skip_special_tokens=skip_special_tokens)
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        shown = (token_id for token_id in reversed(prompt) if token_id not in self._skipped)
        last = list(islice(shown, _NUM_PROMPT_TOKENS + _MAX_CHARACTER_BYTES - 1))[::-1]
        self._ids: list[int] = []
        """The token ids of the window."""
        self._given_text = ""
        """The part of the window's text that is already in a piece, or in the prompt."""
        # Some tokenizers decode the bytes of a character only together. So try earlier and earlier
        # beginnings of the window, until the text of the window does not end inside a character. If
        # no beginning works, the prompt itself ends inside a character. The first new token would
        # then change the prompt's text, so leave the prompt out of the window.
        for start in range(max(0, len(last) - _NUM_PROMPT_TOKENS), -1, -1):
            if not (text := self._decode(last[start:])).endswith(REPLACEMENT):
                self._ids, self._given_text = last[start:], text
                break
        self._num_given = len(self._ids)
        """How many tokens at the beginning of the window have the text `_given_text`."""

    def add(self, token_id: int) -> str:
        """The next piece of text; empty if the text of this token may still change."""
        if token_id in self._skipped:
            return ""
        self._ids.append(token_id)
        text = self._decode(self._ids)
        if len(text) > len(self._given_text) and not text.endswith(REPLACEMENT):
            return self._give(text, len(self._ids))
        if len(self._ids) - self._num_given >= _MAX_WAITING_TOKENS:
            return self._give(*self._certain_part(text))
        return ""

    def flush(self) -> str:
        """The last piece of text, which may end with an incomplete character. Call this at the end
        of the sequence."""
        return self._give(self._decode(self._ids), len(self._ids))

    def _certain_part(self, text: str) -> tuple[str, int]:
        """The beginning of the window whose text cannot change any more: its text, and its number
        of tokens."""
        for num_left in range(_MAX_CHARACTER_BYTES, 2 * _MAX_CHARACTER_BYTES):
            end = len(self._ids) - num_left
            head = self._decode(self._ids[:end])
            if head + self._decode(self._ids[end:]) == text:  # the cut splits no character
                return head, end
        return text, len(self._ids)

    def _give(self, text: str, num_tokens: int) -> str:
        """The new part of `text`, which is the text of the window's first `num_tokens` tokens.
        Moves the window forward."""
        piece = text[len(self._given_text) :]
        del self._ids[: self._num_given]
        self._num_given = num_tokens - self._num_given
        self._given_text = self._decode(self._ids[: self._num_given])
        return piece


class StopStrings:
    """Finds the stop string that is complete first in one text, which arrives in pieces. If several
    stop strings end at the same place, finds the one that comes first in the list. Holds text back
    only if the text may be the beginning of a stop string."""

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        """With `include`, the text ends after the stop string, otherwise before it."""
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self._num_endless = 0
        """How many of the first characters of `_held` came in pieces in which no stop string may
        end."""

    def add(self, piece: str, *, may_end: bool = True) -> tuple[str, str | None]:
        """The text that can be passed on now, and the stop string that ends it; None if the text
        goes on. Without `may_end`, a stop string may begin in `piece`, but not end there."""
        if not self._stops:
            return piece, None
        text = self._held + piece
        if not may_end:
            self._num_endless = len(text)
        found = []
        for stop in self._stops:
            begin = text.find(stop, max(0, self._num_endless - len(stop) + 1))
            if begin >= 0:
                found.append((begin + len(stop), stop))
        if found:
            self._held = ""
            end, stop = min(found, key=lambda each: each[0])
            return text[: end if self._include else end - len(stop)], stop
        keep = max(overlap(text, stop) for stop in self._stops)
        num_safe = len(text) - keep
        self._held = text[num_safe:]
        self._num_endless = max(0, self._num_endless - num_safe)
        return text[:num_safe], None

    def flush(self) -> str:
        """The text that is held back. Call this at the end of the text, if no stop string was
        found."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that is also a beginning of `stop`, but not all of
    `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


def text_offsets(
    tokenizer: ReleaseTokenizer, token_ids: Sequence[int], hidden: Collection[int] = ()
) -> list[int]:
    """For each of `token_ids`, the number of characters before it in their text. The tokens at the
    positions `hidden` have no text."""
    shown = [token_id for position, token_id in enumerate(token_ids) if position not in hidden]
    texts = [tokenizer.token_text(token_id) for token_id in shown]
    if "".join(texts) != tokenizer.decode(shown, skip_special_tokens=False):
        # The text of some token depends on the tokens around it.
        texts = list(map(Detokenizer(tokenizer, skip_special_tokens=False).add, shown))
    lengths = map(len, texts)
    all_lengths = (0 if position in hidden else next(lengths) for position in range(len(token_ids)))
    return list(islice(accumulate(all_lengths, initial=0), len(token_ids)))
