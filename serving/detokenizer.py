"""Decodes the tokens of a sequence while they arrive."""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate, islice

from serving.tokenizer import REPLACEMENT, ReleaseTokenizer

_MAX_CHARACTER_BYTES = 4
"""A character has at most this many bytes in UTF-8. Because a token has at least one byte, this is
also the largest number of tokens that share a character."""
_MAX_WAITING_TOKENS = 16
"""If this many tokens wait for the end of a character, the text of all but the last few is
passed on."""
_NUM_PROMPT_TOKENS = 6
"""How many of the prompt's last tokens are decoded together with the first new tokens."""


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


def text_offsets(tokenizer: ReleaseTokenizer, token_ids: tuple[int, ...]) -> Iterator[int]:
    """For each of `token_ids`, the number of characters of text before it, without the text of
    special tokens."""
    texts = [
        "" if token_id in tokenizer.special_ids else tokenizer.token_text(token_id)
        for token_id in token_ids
    ]
    if "".join(texts) == tokenizer.decode(token_ids):
        lengths = map(len, texts)
    else:
        # The text of some token depends on the tokens around it.
        lengths = map(len, map(Detokenizer(tokenizer).add, token_ids))
    return islice(accumulate(lengths, initial=0), len(token_ids))
