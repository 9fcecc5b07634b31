"""The questions of the rows that a release was trained on, in all their wordings; and which of them
a request asks in other words.

A small model is surer of an answer if it is asked in the words of the row. So with `ground =
"assist"` under `[serving]`, the server looks for the row that a request means, and asks the model
in the words of this row. The search is the full-text search of SQLite (BM25,
https://sqlite.org/fts5.html), and needs no model. If it is not sure, the request stays as it is.
"""

import math
import re
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, RootModel

from serving.weights.release import QUESTIONS_FILE, parse

COVERED = 1 / 3
"""The search is sure of a row only if the row has at least this share of what the words of the
request tell. A word that few rows have tells more."""
SECOND = 0.9
"""And only if the score of the second row is at most this share of the score of the first."""
MOST_WORDS = 100
"""Of a longer text, only so many words are looked up."""

Kind = Literal["messages", "prompt"]


class WordIndex:
    """Finds texts by their words."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._index = sqlite3.connect(":memory:", check_same_thread=False)
        self._index.execute("CREATE VIRTUAL TABLE texts USING fts5(text)")
        numbered = enumerate(texts)
        self._index.executemany("INSERT INTO texts (rowid, text) VALUES (?, ?)", numbered)
        (self._size,) = self._index.execute("SELECT count(*) FROM texts").fetchone()

    def nearest(self, text: str, limit: int) -> list[tuple[int, float]]:
        """The numbers of the texts that have the most telling words of `text`, best first, each
        with its score."""
        words = " OR ".join(_words(text))
        query = "SELECT rowid, -rank FROM texts WHERE texts MATCH ? ORDER BY rank LIMIT ?"
        return self._index.execute(query, (words, limit)).fetchall() if words else []

    def covered(self, text: str, number: int) -> float:
        """How much of what the words of `text` tell is in the text with this number, from 0 to
        1."""
        told = found = 0.0
        for word in _words(text):
            query = "SELECT count(*), total(rowid = ?) FROM texts WHERE texts MATCH ?"
            count, has = self._index.execute(query, (number, word)).fetchone()
            tells = math.log((self._size + 1) / (count + 0.5))
            told, found = told + tells, found + tells * has
        return found / told if told else 0.0


def _words(text: str) -> list[str]:
    return [f'"{word}"' for word in dict.fromkeys(re.findall(r"\w+", text.lower()))][:MOST_WORDS]


class Question(BaseModel):
    """What is asked to get one answer."""

    model_config = ConfigDict(frozen=True)

    kind: Kind
    """Whether it is asked as a conversation, or as a prompt without template."""
    wordings: tuple[str, ...]
    """The words of the first row with this answer, and then all others."""
    row: str
    """The place of this row."""


_Stored = RootModel[tuple[Question, ...]]


class Questions:
    def __init__(self, questions: Sequence[Question]) -> None:
        self._questions = questions
        self._known = {text: each for each in questions for text in each.wordings}
        self._index = WordIndex("\n".join(each.wordings) for each in questions)

    def meant(self, text: str) -> Question | None:
        """The question that `text` asks in other words than the row's. None if there is none, or
        the search is not sure."""
        if text in self._known:
            found = self._known[text]
            return None if text == found.wordings[0] else found
        (best, score), (_, second) = [*self._index.nearest(text, 2), (0, 0.0), (0, 0.0)][:2]
        if not score or second > SECOND * score or self._index.covered(text, best) < COVERED:
            return None
        return self._questions[best]


def write_questions(folder: Path, questions: Sequence[Question]) -> None:
    (folder / QUESTIONS_FILE).write_text(_Stored(tuple(questions)).model_dump_json(), "utf-8")


def read_questions(folder: Path) -> Mapping[Kind, Questions]:
    """The questions of the release in `folder`. Empty if it has none. Raises ReleaseError if its
    file of questions is damaged."""
    try:
        content = (folder / QUESTIONS_FILE).read_bytes()
    except FileNotFoundError:
        return {}
    found = parse(_Stored, content, QUESTIONS_FILE).root
    kinds: tuple[Kind, ...] = ("messages", "prompt")
    return {kind: Questions([each for each in found if each.kind == kind]) for kind in kinds}
