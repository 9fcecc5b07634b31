"""Other wordings of the questions in a dataset. Whoever asks does not know the words of the row, so
the model must not learn an answer to these words alone.

A row may bring wordings (`paraphrases`). For a pretrained model, more are made up from the
questions of the dataset alone, whatever the language: the words that many questions have are
dropped, the order of the others changes, and sometimes the beginning of another question stands
before them. A made-up wording has at least one word, or a combination of words, that no other
question has. So it is never a wording of another row.
"""

import math
import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise, takewhile

from pipeline.retrain.rows import Row

KEPT, KEPT_MORE = 0.1, 0.75
"""A made-up wording keeps a word that all questions have with the probability KEPT, and the rarest
word of its question with the sum of both."""
ANSWERED = 0.4
"""The share of made-up wordings that have words of the answer, too. Who asks in other words often
uses those in which one would answer."""
SHARE = 0.5, 1.2
"""Each made-up wording multiplies these probabilities by a number between these two."""
SHUFFLED, LOWERED = 0.5, 0.5
FRAMED, FRAME_WORDS = 0.3, 3
"""The share of made-up wordings that begin with up to FRAME_WORDS words of another question."""
MOST_ADDED = 3
"""At most so many words of the answer are added (ANSWERED)."""
TRIES = 8
UNSEEN = -1
"""The number of the made-up wordings that are not trained on."""
MAX_UNSEEN = 60


def unseen(
    rows: Sequence[Row], held_out: Sequence[Row], seed: int, *, makes_up: bool
) -> tuple[list[Row], bool]:
    """At most MAX_UNSEEN wordings of `rows` that are not trained on, and whether they are made up:
    paraphrases that are held back, and held-out rows that have the answer of a row. If there are
    none, wordings are made up (`makes_up`)."""
    answers = {row.answer for row in rows if row.is_counted}
    found = [row.asked(row.held_back) for row in rows if row.held_back is not None]
    found += [row for row in held_out if row.answer in answers]
    is_made_up = makes_up and not found
    if is_made_up:
        wordings = Wordings(rows)
        found = [made for row in rows if (made := wordings.of(row, UNSEEN, seed)) is not None]
    chance = random.Random(seed)
    return chance.sample(found, min(MAX_UNSEEN, len(found))), is_made_up


class Wordings:
    """Makes up wordings of the questions of `rows`."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._num_rows = len(rows)
        self._beginnings: list[list[str]] = []
        self._asked: defaultdict[str, set[int]] = defaultdict(set)
        """Word → the numbers of the questions that have it."""
        self._same: defaultdict[str, set[int]] = defaultdict(set)
        """Question → the numbers of the rows that have it."""
        self._answered: Counter[str] = Counter()
        """Word → how many answers have it."""
        for number, row in enumerate(rows):
            question = row.last_question or ""
            self._beginnings.append(question.split()[:FRAME_WORDS])
            self._same[_plain(question)].add(number)
            for word in question.split():
                self._asked[_plain(word)].add(number)
            self._answered.update({_plain(word) for word in (row.answer or "").split()})

    def of(self, row: Row, number: int, seed: int) -> Row | None:
        """A wording of `row`, one of `rows`. Another `number` gives another one. None if none was
        found, as for a question of one word."""
        question = row.last_question or ""
        words, answer = question.split(), (row.answer or "").split()
        if len(words) < 2:
            return None
        chance = random.Random(f"{seed} {number} {row.digest}")
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
            holders = [self._asked[_plain(word)] for word in kept]
            if not kept or set.intersection(*holders) - self._same[_plain(question)]:
                continue
            if chance.random() < ANSWERED:
                kept += chance.sample(rare, min(len(rare), chance.randint(1, MOST_ADDED)))
            if chance.random() < SHUFFLED:
                chance.shuffle(kept)
            if chance.random() < FRAMED:
                frame = chance.choice(self._beginnings)
                kept = [*frame[: chance.randint(1, FRAME_WORDS)], *kept]
            text = " ".join(kept)
            return row.asked(text.lower() if chance.random() < LOWERED else text)
        return None

    def _weight(self, word: str) -> float:
        return math.log((self._num_rows + 1) / len(self._asked[_plain(word)]))


def _plain(text: str) -> str:
    return "".join(letter for letter in text.lower() if letter.isalnum() or letter.isspace())


def told_apart(answers: Sequence[tuple[int, ...]], more: int) -> list[int]:
    """For each answer, how many of its tokens tell it from all others, and `more`."""
    shared: Counter[tuple[int, ...]] = Counter()
    for first, second in pairwise(sorted(set(answers))):
        pairs = zip(first, second, strict=False)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        shared[first] = max(shared[first], same)
        shared[second] = max(shared[second], same)
    return [shared[answer] + 1 + more for answer in answers]
