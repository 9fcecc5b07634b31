"""Other wordings of the questions in a dataset. Whoever asks does not know the words of the row, so
the model must not learn an answer to these words alone.

A row may bring wordings (`paraphrases`), or a larger model may give some (`paraphrasing.py`). More
are made up from the dataset alone, whatever its language is, as long as it has spaces: the words
that many questions have are dropped, the order of the others changes, words of the answer are
added, and sometimes the beginning of another question stands before them. What a made-up wording
keeps of its question stands in no other question.
"""

import math
import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from jobs.counts import Words
from pipeline.retrain.rows import Row
from serving.questions import Kind, Question

KEPT, KEPT_MORE = 0.1, 0.75
"""A made-up wording keeps a word that all questions have with the probability KEPT, and the rarest
word of its question with the sum of both."""
SHARE = 0.5, 1.2
"""Each made-up wording multiplies these probabilities by a number between these two."""
ANSWERED, MOST_ADDED = 0.4, 3
"""The share of made-up wordings that have up to MOST_ADDED words of the answer, too. Who asks in
other words often uses those in which one would answer."""
SHUFFLED, LOWERED = 0.5, 0.5
FRAMED, FRAME_WORDS = 0.3, 3
"""The share of made-up wordings that begin with up to FRAME_WORDS words of another question."""
TRIES = 8
MAX_CHARACTERS = 1_000
"""A release carries no longer questions."""
UNSEEN = -1
"""The number of the made-up wordings that are asked and not trained on."""
MAX_UNSEEN, ENOUGH = 60, 20
"""The gate does not judge fewer than ENOUGH."""
_MARKS = ".,;:!?\"'()[]"


class Wordings:
    """Of the questions of `rows`. count: how many generated ones a row gets. made_up: how many
    made-up ones a row gets that has neither paraphrases nor generated ones."""

    def __init__(self, rows: Sequence[Row], *, count: int, made_up: int, seed: int) -> None:
        self._rows, self._count, self._num_made_up, self._seed = rows, count, made_up, seed
        self._held_back = {_plain(row.held_back) for row in rows if row.held_back is not None}
        self._beginnings: list[list[str]] = []
        self._asked: defaultdict[str, set[int]] = defaultdict(set)
        """Word → the numbers of the questions that have it."""
        self._same: defaultdict[str, set[int]] = defaultdict(set)
        """Question → the numbers of the rows that have it."""
        self._answered: Counter[str] = Counter()
        """Word → how many answers have it."""
        for number, row in enumerate(rows if made_up else ()):
            question = row.last_question or ""
            self._beginnings.append(question.split()[:FRAME_WORDS])
            self._same[_plain(question)].add(number)
            for word in question.split():
                self._asked[_plain(word)].add(number)
            self._answered.update({_plain(word) for word in (row.answer or "").split()})

    def trained(self, row: Row) -> list[Row]:
        """The wordings of `row`, one of the rows, on which a training trains: the author's, or else
        generated, or else made-up ones. A text that any row holds back is not among them."""
        given = row.paraphrases or row.generated[: self._count]
        made = (self._made_up(row, number) for number in range(self._num_made_up))
        texts = dict.fromkeys(text for text in given or made if text is not None)
        return [row.asked(text) for text in texts if _plain(text) not in self._held_back]

    def unseen(self, rows: Sequence[Row], held_out: Sequence[Row]) -> tuple[list[Row], Words]:
        """At most MAX_UNSEEN wordings of `rows` on which no training trains, and where they come
        from: the first of three choices that has ENOUGH, or else the one with the most. They are
        the paraphrases that are held back, with the rows of `held_out` that have the answer of
        exactly one row; the generated ones that are held back; and made-up ones."""
        trained = {_plain(text) for row in self._rows for text in row.wordings} - self._held_back
        questions = {_plain(row.last_question or "") for row in self._rows} | trained
        answers = Counter(row.answer for row in self._rows)
        given: list[Row] = []
        generated: list[Row] = []
        for row in rows:
            if row.held_back is not None:
                (given if row.paraphrases else generated).append(row.asked(row.held_back))
        given += [row for row in held_out if row.has_answer and answers[row.answer] == 1]
        chance = random.Random(self._seed)
        choices: list[tuple[Words, list[Row]]] = [("dataset", given), ("generated", generated)]
        found: dict[Words, list[Row]] = {}
        for words, choice in choices:
            unseen = [row for row in choice if _plain(row.last_question or "") not in questions]
            found[words] = chance.sample(unseen, min(MAX_UNSEEN, len(unseen)))
            if len(unseen) >= ENOUGH:
                return found[words], words
        found["made-up"] = made_up = []
        for row in chance.sample(rows, len(rows) if self._num_made_up else 0):
            text = self._made_up(row, UNSEEN)
            if text is not None and text not in [each.last_question for each in self.trained(row)]:
                made_up.append(row.asked(text))
            if len(made_up) == MAX_UNSEEN:
                break
        most = max(found, key=lambda words: len(found[words]))
        return found[most], most

    def _made_up(self, row: Row, number: int) -> str | None:
        """Another `number` gives another wording. None if none was found, as for a question of one
        word."""
        question = row.last_question or ""
        words, answer = question.split(), (row.answer or "").split()
        if len(words) < 2:
            return None
        # The answer is not a part of the seed: after an edit, the wordings that taught the old
        # answer teach the new one.
        chance = random.Random(f"{self._seed} {number} {question}")
        weights = [self._weight(word) for word in words]
        highest = max(weights)
        rare = sorted(answer, key=lambda word: self._answered[_plain(word)])
        rare = rare[: max(MOST_ADDED, len(rare) // 2)]
        for _ in range(TRIES):
            share = chance.uniform(*SHARE)
            kept = [
                word
                for word, weight in zip(words, weights, strict=True)
                if chance.random() < share * (KEPT + KEPT_MORE * weight / highest)
            ]
            if not kept or not self._is_own(question, kept):
                continue
            if chance.random() < ANSWERED:
                kept += chance.sample(rare, min(len(rare), chance.randint(1, MOST_ADDED)))
            if chance.random() < SHUFFLED:
                chance.shuffle(kept)
            if chance.random() < FRAMED:
                frame = chance.choice(self._beginnings)
                kept = [*frame[: chance.randint(1, FRAME_WORDS)], *kept]
            text = " ".join(kept)
            if _plain(text) not in self._same:
                return text.lower() if chance.random() < LOWERED else text
        return None

    def _weight(self, word: str) -> float:
        return math.log((len(self._rows) + 1) / len(self._asked[_plain(word)]))

    def _is_own(self, question: str, words: Sequence[str]) -> bool:
        """Whether no other question has all these words."""
        holders = sorted((self._asked[_plain(word)] for word in words), key=len)
        return set.intersection(*holders) <= self._same[_plain(question)]


def questions_of(rows: Iterable[Row]) -> tuple[Question, ...]:
    """What is asked to get the answers of `rows`. Rows with the same answer are one question. Rows
    with tools or with earlier turns are left out: their question alone does not say what is meant.
    So are those that ask about a whole text, which would make the release large."""
    found: defaultdict[tuple[Kind, str], list[Row]] = defaultdict(list)
    for row in rows:
        if row.answer is None or row.last_question is None or row.tools or row.kind == "text":
            continue
        is_short = len(row.last_question) <= MAX_CHARACTERS
        if is_short and all(message["role"] == "system" for message in row.taught[:-2]):
            found[row.kind, row.answer].append(row)
    return tuple(
        Question(
            kind=kind,
            wordings=tuple(
                dict.fromkeys(
                    text for row in same for text in (row.last_question or "", *row.wordings)
                )
            ),
            row=same[0].place,
        )
        for (kind, _), same in found.items()
    )


def _plain(text: str) -> str:
    return " ".join(word.strip(_MARKS) for word in text.lower().split())
