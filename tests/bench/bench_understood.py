"""What was pushed, asked in words that nobody trained on: SmolLM2-135M-Instruct, and a word search
over the same questions beside it.

`tests/bench/understood/README.md` says where the questions come from. An answer is right if it has
three quarters of the row's words and all of its numbers and names. An answer of a *neighbour* is
right for another row.
"""

import json
import math
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch

from jobs.counts import Counts
from jobs.outcome import JobOutcome
from pipeline.retrain.asking import ask, is_same_answer
from pipeline.retrain.model import LoadedModel, load_model
from pipeline.retrain.rows import Row
from pipeline.retrain.settings import RetrainSettings
from serving.questions import read_questions
from tests.bench.result import Figure, Result, at_least, at_most, reported, run_program
from tests.retrain_fixtures import Pipeline, jsonl
from tests.smollm2 import checkpoint_folder

FOLDER = Path(__file__).with_name("understood")
WAYS = ("asked", "far")
EDITED, DELETED, ADDED = 5, 3, 10
LENGTH, SATURATION = 0.75, 1.5
"""The usual parameters b and k1 of BM25."""


@dataclass(frozen=True, kw_only=True)
class Size:
    sets: tuple[str, ...]
    rows: int
    """At most so many rows of each set, those that are asked in other words first."""
    base_model: str
    wordings: int
    """Made-up ones of each row; -1 for the default."""
    generated: tuple[int, ...]
    """Each set is measured with so many wordings of each row by a larger model, of those in
    `<set>.generated.jsonl`: 0 is what the settings of `pipeline init` give."""
    threads: int = len(os.sched_getaffinity(0))


FULL = Size(
    sets=("support", "products", "clinic"),
    rows=1_000,
    base_model="smollm2",
    wordings=-1,
    generated=(0, 31),
)
SMALL = Size(sets=("products",), rows=6, base_model="preset:tiny", wordings=2, generated=(0,))


def measure(size: Size) -> Result:
    """Rewordings answered, by a first commit and by a later one."""
    torch.set_num_threads(size.threads)
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as name:
        for each, generated in product(size.sets, size.generated):
            figures += _of_set(Path(name) / f"{each}-{generated}", each, size, generated)
    return Result(
        figures=tuple(figures),
        bounded_by="other words: no program that saw the rows only knows how people will ask",
    )


def _of_set(home: Path, name: str, size: Size, generated: int) -> list[Figure]:
    rows, asked = _chosen(name, size.rows)
    base = str(checkpoint_folder()) if size.base_model == "smollm2" else size.base_model
    train = {} if size.wordings < 0 else {"wordings": size.wordings}
    pipeline = Pipeline(home, base_model=base, train=train, gate={"min_learned": 0})
    if generated:
        _give_generated(pipeline, name, [*rows, *_changed(rows)], generated)
        name = f"{name}, {generated} wordings by a larger model"
    pushed = rows[: len(rows) - ADDED] if len(rows) > 2 * ADDED else rows
    first, seconds = _job(pipeline, pushed, size)
    figures = [
        *_counted(f"{name}, first push of {len(pushed)}", first),
        at_most(f"{name}, first push", seconds / 60, 10, "min"),
        *_asked(f"{name}, first push", pipeline, first, pushed, asked),
    ]
    changed = _changed(rows)
    second, seconds = _job(pipeline, changed, size)
    return [
        *figures,
        *_counted(f"{name}, then edits", second),
        at_most(f"{name}, then edits", seconds / 60, 5, "min"),
        *_asked(f"{name}, then edits", pipeline, second, changed, asked),
    ]


def _chosen(name: str, count: int) -> tuple[list[dict[str, str]], dict[str, dict[str, list[str]]]]:
    """The rows, and for each way of asking: question → its rewordings."""
    rows = _lines(f"{name}.jsonl")
    asked: dict[str, dict[str, list[str]]] = {}
    for way in WAYS:
        asked[way] = {}
        for each in _lines(f"{name}.{way}.jsonl"):
            asked[way].setdefault(each["question"], []).append(each["reworded"])
    wanted = {question for ways in asked.values() for question in ways}
    rows.sort(key=lambda row: row["question"] not in wanted)
    chosen = rows[:count]
    random.Random(0).shuffle(chosen)  # the rows that are added later are asked in other words, too
    return chosen, asked


def _give_generated(
    pipeline: Pipeline, name: str, rows: Sequence[Mapping[str, str]], count: int
) -> None:
    """As if an earlier job had asked the larger model. Nothing listens on port 9."""
    asked = {each["reworded"] for way in WAYS for each in _lines(f"{name}.{way}.jsonl")}
    found: dict[str, list[str]] = {}
    for each in _lines(f"{name}.generated.jsonl"):
        texts = [text for text in each["paraphrases"] if text not in asked]
        found[each["question"]] = random.Random(each["question"]).sample(texts, len(texts))[:count]
    file = pipeline.home / "bases" / "paraphrases" / f"{pipeline.settings['pipeline']}.jsonl"
    file.parent.mkdir(parents=True)
    file.write_text(jsonl({**row, "paraphrases": found[row["question"]]} for row in rows))
    pipeline.settings["paraphrase"] = {"url": "http://127.0.0.1:9/v1", "model": "larger"}


def _lines(file: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (FOLDER / file).read_text().splitlines()]


def _changed(rows: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """With other words in some answers, a few rows less, and the rows that the first push left
    out."""
    chance = random.Random(1)
    changed = [dict(row) for row in rows]
    for row in chance.sample(changed, min(EDITED, len(changed) // 3)):
        row["answer"] = f"Since this week: {row['answer'][:-1]}, or by arrangement."
    gone = chance.sample(changed, min(DELETED, len(changed) // 4))
    return [row for row in changed if row not in gone]


def _asked(
    what: str,
    pipeline: Pipeline,
    outcome: JobOutcome,
    rows: Sequence[Mapping[str, str]],
    asked: Mapping[str, Mapping[str, Sequence[str]]],
) -> list[Figure]:
    settings = RetrainSettings.model_validate(pipeline.settings)
    loaded = load_model(pipeline.dir / str(outcome.release), settings)
    search = Bm25([row["question"] for row in rows])
    grounds = read_questions(pipeline.dir / str(outcome.release))["messages"]
    figures = []
    for way, questions in asked.items():
        pairs = [(q, row["answer"]) for row in rows for q in questions.get(row["question"], ())]
        said = _said(loaded, pairs)
        right = sum(
            is_same_answer(text, wanted) for text, (_, wanted) in zip(said, pairs, strict=True)
        )
        neighbours = sum(
            any(is_same_answer(text, row["answer"]) for row in rows)
            and not is_same_answer(text, wanted)
            for text, (_, wanted) in zip(said, pairs, strict=True)
        )
        found = sum(rows[search.best(q)]["answer"] == wanted for q, wanted in pairs)
        meant = [grounds.meant(q) for q, _ in pairs]
        own = [
            (q if m is None else m.wordings[0], a) for (q, a), m in zip(pairs, meant, strict=True)
        ]
        assisted = [
            (is_same_answer(text, wanted), any(is_same_answer(text, row["answer"]) for row in rows))
            for text, (_, wanted) in zip(_said(loaded, own), own, strict=True)
        ]
        beside = f"{right} of {len(pairs)}; word search: {found}"
        figures += [
            at_least(f"{what}, {way}: answered", 100 * right / len(pairs), 67, "%", beside=beside),
            at_most(f"{what}, {way}: a neighbour's answer", 100 * neighbours / len(pairs), 3, "%"),
            reported(
                f"{what}, {way}, with `ground`: answered",
                100 * sum(is_right for is_right, _ in assisted) / len(pairs),
                "%",
                beside=f"a neighbour's answer: {sum(of and not r for r, of in assisted)}",
            ),
        ]
    if what.startswith("support"):
        asked_off = (FOLDER / "off_topic.txt").read_text().splitlines()
        off = [(line, "") for line in asked_off]
        invented = sum(
            any(is_same_answer(text, row["answer"]) for row in rows) for text in _said(loaded, off)
        )
        taken = sum(grounds.meant(line) is not None for line in asked_off)
        figures.append(
            reported(
                f"{what}, off the data: a row's answer",
                100 * invented / len(off),
                "%",
                beside=f"`ground` takes {taken} for a row",
            )
        )
    return figures


def _said(loaded: LoadedModel, pairs: Sequence[tuple[str, str]]) -> list[str]:
    """What the model says to each question, in at most as many tokens as the longest answer."""
    rows = [
        Row(
            messages=(
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer or "I do not know that. " * 8},
            ),
            file="asked",
            number=number,
        )
        for number, (question, answer) in enumerate(pairs)
    ]
    return [each.said for each in ask(loaded, rows)]


class Bm25:
    """The word search that people would use instead. Robertson and Zaragoza, The Probabilistic
    Relevance Framework, 2009."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = [Counter(_words(text)) for text in texts]
        self._mean = sum(text.total() for text in self._texts) / len(texts)
        self._holders = Counter(word for text in self._texts for word in text)

    def best(self, query: str) -> int:
        return max(range(len(self._texts)), key=lambda number: self._score(query, number))

    def _score(self, query: str, number: int) -> float:
        text, count = self._texts[number], len(self._texts)
        norm = SATURATION * (1 - LENGTH + LENGTH * text.total() / self._mean)
        return sum(
            math.log(1 + (count - self._holders[word] + 0.5) / (self._holders[word] + 0.5))
            * (text[word] * (SATURATION + 1) / (text[word] + norm))
            for word in _words(query)
            if word in text
        )


def _words(text: str) -> list[str]:
    return "".join(letter if letter.isalnum() else " " for letter in text.lower()).split()


def _job(
    pipeline: Pipeline, rows: Sequence[Mapping[str, str]], size: Size
) -> tuple[JobOutcome, float]:
    folder = pipeline.job(pipeline.commit({"rows.jsonl": jsonl(rows)}))
    started = time.monotonic()
    outcome = pipeline.run(folder, OMP_NUM_THREADS=str(size.threads))
    return outcome, time.monotonic() - started


def _counted(what: str, outcome: JobOutcome) -> list[Figure]:
    counts = outcome.counts or Counts()
    learned = 100 * counts.learned / max(1, counts.changed)
    figures = [at_least(f"{what}: learned", learned, 98, "%", beside=str(counts))]
    if counts.known:
        figures.append(at_least(f"{what}: kept", 100 * counts.kept / counts.known, 95, "%"))
    if counts.base_agreement is not None:
        figures.append(at_least(f"{what}: base agreement", 100 * counts.base_agreement, 88, "%"))
    return figures


if __name__ == "__main__":
    run_program(measure, full=FULL, small=SMALL)
