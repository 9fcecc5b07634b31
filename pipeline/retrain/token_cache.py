"""Keeps the token sequences of rows from one job of a pipeline to the next. So if a commit edits
one row of many, the next job tokenizes only this row."""

import hashlib
import json
import logging
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pipeline.retrain.rows import Row
from pipeline.retrain.tokens import TokenSequence, sequences
from serving.weights.atomic_file import atomic_file

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

FILE = "tokens.npz"
MIN_ROWS = 1_000
"""For fewer rows, nothing is loaded or saved, because tokenizing them takes less than half a
second."""


class TokenCache:
    """Turns rows into token sequences, and remembers the sequences by the hash of their row.

    folder: the cache folder of the job's pipeline. If None, nothing is loaded from disk or saved.
    """

    def __init__(
        self, folder: Path | None, tokenizer: "PreTrainedTokenizerBase", max_length: int
    ) -> None:
        self._file = folder / FILE if folder is not None else None
        self._tokenizer = tokenizer
        self._max_length = max_length
        self._found: dict[str, tuple[TokenSequence, ...]] = {}
        self._is_loaded = False
        self._is_changed = False
        self._used: set[str] = set()

    def sequences(self, rows: Sequence[Row]) -> list[TokenSequence]:
        """Returns the same as `tokens.sequences`, and raises the same errors."""
        if len(rows) >= MIN_ROWS and not self._is_loaded:
            self._found = self._load() | self._found
            self._is_loaded = True
        missing = {row.digest: row for row in rows if row.digest not in self._found}
        pieces: dict[str, list[TokenSequence]] = {digest: [] for digest in missing}
        digests = list(missing)
        for piece in sequences(missing.values(), self._tokenizer, self._max_length):
            pieces[digests[piece.row]].append(piece)
        self._found |= {digest: tuple(each) for digest, each in pieces.items()}
        self._used |= {row.digest for row in rows}
        self._is_changed = self._is_changed or bool(missing)
        return [
            replace(piece, row=index)
            for index, row in enumerate(rows)
            for piece in self._found[row.digest]
        ]

    def save(self) -> None:
        """Write the sequences of all rows that were asked for. Does nothing if these are fewer than
        MIN_ROWS, or if none of them is new."""
        if self._file is None or not self._is_changed or len(self._used) < MIN_ROWS:
            return
        digests = sorted(self._used)
        pieces = [piece for digest in digests for piece in self._found[digest]]
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(self._file) as file:
            np.savez(
                file,
                key=np.array(self._key()),
                digests=np.frombuffer(bytes.fromhex("".join(digests)), np.uint8),
                num_pieces=np.array([len(self._found[digest]) for digest in digests], np.int32),
                lengths=np.array([len(piece.token_ids) for piece in pieces], np.int32),
                token_ids=np.array([i for piece in pieces for i in piece.token_ids], np.int32),
                learned=np.array([i for piece in pieces for i in piece.learned], np.bool_),
            )
        self._is_changed = False

    def _load(self) -> dict[str, tuple[TokenSequence, ...]]:
        """The sequences that an earlier job has saved. Empty if there is no readable file, or if it
        was made with another tokenizer or another version (`_key`)."""
        if self._file is None or not self._file.is_file():
            return {}
        try:
            with self._file.open("rb") as file, np.load(file, allow_pickle=False) as kept:
                if str(kept["key"]) != self._key():
                    return {}
                arrays = {name: kept[name] for name in kept.files}
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            logger.warning("%s cannot be read, so it is made again: %s", self._file, error)
            return {}
        names = arrays["digests"].tobytes().hex()
        token_ids, learned = arrays["token_ids"].tolist(), arrays["learned"].tolist()
        ends = np.cumsum(arrays["lengths"]).tolist()
        pieces = [
            TokenSequence(tuple(token_ids[start:end]), tuple(learned[start:end]), 0)
            for start, end in zip([0, *ends], ends, strict=False)
        ]
        found, first = {}, 0
        for number, count in enumerate(arrays["num_pieces"].tolist()):
            found[names[64 * number : 64 * number + 64]] = tuple(pieces[first : first + count])
            first += count
        return found

    def _key(self) -> str:
        """A hash of everything that decides about the token ids, except the row itself."""
        tokenizer = self._tokenizer
        made_by = [
            *(version("hotpush"), version("transformers"), self._max_length),
            *(tokenizer.backend_tokenizer.to_str(), str(tokenizer.chat_template)),
            *(sorted(map(str, tokenizer.special_tokens_map.items())),),
        ]
        return hashlib.sha256(json.dumps(made_by).encode()).hexdigest()
