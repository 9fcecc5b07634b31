"""Prompts that are real text: docstrings of the standard library."""

import itertools
from collections.abc import Iterator
from pathlib import Path

from tests.docstring_stream import docstrings

STRIDE = 37
"""Tokens from the beginning of one prompt to that of the next."""


class Prompts:
    """Runs of token ids of real text, each with a beginning of its own."""

    def __init__(self, folder: Path) -> None:
        from serving.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(folder)
        if tokenizer.vocab_size == 50_000:  # a word for each token id: text would be all unknown
            self._token_ids = [(977 * place) % 49_999 + 1 for place in range(200_000)]
        else:
            text = "\n\n".join(docstrings(8_000))
            self._token_ids = list(tokenizer.encode(text, add_special_tokens=False))
        self._numbers = itertools.count()

    def take(self, count: int, length: int) -> Iterator[list[int]]:
        for number in itertools.islice(self._numbers, count):
            start = number * STRIDE % (len(self._token_ids) - length)
            yield self._token_ids[start : start + length]
