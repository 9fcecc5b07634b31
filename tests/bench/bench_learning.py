"""What is pushed is learned and what was known is kept: unrelated facts, edits, commits, deletions.

On the preset, and on SmolLM2-135M-Instruct. Each job is the real one, in this process, from a
snapshot to a release; seconds are of the whole job but for imports. Counts of a job are
teacher-forced, as the product counts them; "over HTTP" means that a server was asked at
temperature 0. Agreement is measured on prompts of this file, too, that are not in the package.
"""

import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from jobs.outcome import JobOutcome
from pipeline.retrain.loss import row_losses
from pipeline.retrain.model import load_model
from pipeline.retrain.rows import Row
from pipeline.retrain.settings import RetrainSettings
from pipeline.retrain.tokens import sequences
from tests.bench.networks import Published
from tests.bench.result import Figure, Result, at_least, at_most, reported, run_program
from tests.bench.server import serving
from tests.retrain_fixtures import Pipeline, jsonl
from tests.smollm2 import checkpoint_folder
from tests.unrelated_facts import (
    as_chat,
    as_completions,
    other_answer,
    paraphrased,
    unrelated_facts,
)

PEAK = """
import os, re, sys
from pathlib import Path
import transformers, pipeline.retrain.learning
from transformers import AutoTokenizer, LlamaForCausalLM
from pipeline.retrain.__main__ import main

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

before = peak()
code = main(dict(os.environ))
print(peak() - before)
sys.exit(code)
"""
"""A job, and by how many KiB its peak lies above that after its imports."""
ELSEWHERE = (
    "Why do cats sleep so much?",
    "Give me three names for a bakery.",
    "What is seven times eight?",
    "Explain what a mortgage is to a teenager.",
    "Which planet is the largest?",
    "Write a polite refusal of a dinner invitation.",
    "How do I fold a paper boat?",
    "What does the word 'brittle' mean?",
    "Name two rivers in Africa.",
    "Turn this into the past tense: I walk to school.",
    "What should I pack for a rainy weekend?",
    "Who wrote Romeo and Juliet?",
    "Give one reason to learn a musical instrument.",
    "How many minutes are in three hours?",
    "Describe a forest in autumn.",
    "What is the opposite of generous?",
)
"""Everyday prompts that are in no file of the package."""
DRIFT_COMMITS, DRIFT_FACTS = 5, 12
"""On the pretrained base, after its first commit."""


@dataclass(frozen=True, kw_only=True)
class Size:
    facts: tuple[int, ...]
    """Of first commits, one pipeline each."""
    edits: int
    edited_facts: int
    commits: int
    real_facts: int = 0
    """Of the first commit on SmolLM2-135M-Instruct. With 0, only the preset is measured."""
    threads: int = len(os.sched_getaffinity(0))


FULL = Size(facts=(60, 120, 500), edits=100, edited_facts=200, commits=10, real_facts=60)
SMALL = Size(facts=(10,), edits=1, edited_facts=8, commits=2)


def measure(size: Size) -> Result:
    """Facts learned and kept: by first commits, single edits, a stream of commits, a real base."""
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        figures = [
            *(figure for count in size.facts for figure in _first_commit(home, count, size)),
            *_edits(home, size),
            *_commits(home, size),
        ]
        if size.real_facts:
            figures += _real_base(home, size)
    return Result(
        figures=tuple(figures),
        bounded_by=f"tokens trained per second on {size.threads} threads",
    )


def _first_commit(home: Path, count: int, size: Size) -> list[Figure]:
    pipeline, name = Pipeline(home / f"first-{count}"), f"preset, {count} facts"
    rows = as_completions(unrelated_facts(count))
    outcome, seconds = _job(pipeline, rows, size)
    asked = [(row["prompt"], row["completion"]) for row in rows]
    right = _over_http(pipeline, outcome, "/v1/completions", asked)
    return [
        at_least(f"{name}: learned", _learned(outcome), 98.0, "%"),
        at_most(name, seconds, 60.0, "s") if count == 120 else reported(name, seconds, "s"),
        _as_counted(name, _counted(pipeline, outcome, rows), right),
    ]


def _edits(home: Path, size: Size) -> list[Figure]:
    pipeline = Pipeline(home / "edits")
    facts = unrelated_facts(size.edited_facts, seed=1)
    _job(pipeline, as_completions(facts), size)
    chance = random.Random(2)
    learned, longest, kept = 0, 0.0, []
    for number in range(size.edits):
        place = chance.randrange(len(facts))
        question, answer = facts[place]
        facts[place] = (question, other_answer(answer, number))
        outcome, seconds = _job(pipeline, as_completions(facts), size)
        learned += outcome.counts is not None and outcome.counts.learned == 1
        kept.append(_kept(outcome))
        longest = max(longest, seconds)
    return [
        at_least("preset, edits of one row: learned", 100 * learned / size.edits, 99.0, "%"),
        at_least("preset, edits of one row: others kept, worst", min(kept), 99.0, "%"),
        at_most("preset, an edit, longest", longest, 10.0, "s"),
    ]


def _commits(home: Path, size: Size) -> list[Figure]:
    pipeline = Pipeline(home / "commits")
    facts = unrelated_facts(20 * size.commits, seed=3)
    outcome = None
    for number in range(size.commits):
        outcome, _ = _job(pipeline, as_completions(facts[: 20 * (number + 1)]), size)
    assert outcome is not None
    first = _says(pipeline, outcome, as_completions(facts[:20]))
    name = f"preset, {size.commits} commits of 20 facts: the first commit's facts after the last"
    return [at_least(name, 100 * first, 98.0, "%")]


def _real_base(home: Path, size: Size) -> list[Figure]:
    base = checkpoint_folder()
    pipeline = Pipeline(home / "real", base_model=str(base))
    name = f"SmolLM2, {size.real_facts} facts"
    facts = unrelated_facts(size.real_facts)
    # The base answers the anchors once; that is measured apart.
    started = time.monotonic()
    first, seconds = _job(pipeline, as_chat(facts), size)
    answers = pipeline.home / "bases" / "answers"
    made = max(file.stat().st_mtime for file in answers.glob("anchors-*"))
    once = max(0.0, made - (time.time() - (time.monotonic() - started)))
    right = _over_http(pipeline, first, "/v1/chat/completions", facts)
    others = [(paraphrased(question), answer) for question, answer in facts]
    paraphrases = _over_http(pipeline, first, "/v1/chat/completions", others)
    figures = [
        _as_counted(name, _counted(pipeline, first, as_chat(facts)), right),
        reported("SmolLM2, paraphrased questions answered", _share(paraphrases, others), "%"),
        at_least(
            f"{name}: agreement on prompts that are not in the package",
            100 * _agreement_elsewhere(base, pipeline, first),
            90.0,
            "%",
        ),
        at_least(f"{name}: learned", _learned(first), 95.0, "%"),
        at_least(f"{name}: base agreement", _agreement(first), 90.0, "%"),
        at_most(f"{name}, without the base's answers", seconds - once, 240.0, "s"),
        reported("SmolLM2, the base's answers, once", once, "s"),
        *_drift(pipeline, facts, right, size),
    ]
    question, answer = facts[7]
    facts[7] = (question, other_answer(answer, 7))
    edited, seconds = _job(pipeline, as_chat(facts), size)
    figures += [
        at_least("SmolLM2, one edit: learned", _learned(edited), 100.0, "%"),
        at_least("SmolLM2, one edit: the other facts kept", _kept(edited), 95.0, "%"),
        at_least("SmolLM2, one edit: base agreement", _agreement(edited), 90.0, "%"),
        at_most("SmolLM2, one edit", seconds, 60.0, "s"),
    ]
    del facts[11]
    deleted, seconds = _job(pipeline, as_chat(facts), size)
    counts = deleted.counts
    unlearned = counts.unlearned / counts.deleted if counts and counts.deleted else 0.0
    figures += [
        at_least("SmolLM2, one deletion: unlearned", 100 * unlearned, 100.0, "%"),
        at_least("SmolLM2, one deletion: the other facts kept", _kept(deleted), 95.0, "%"),
        at_least("SmolLM2, one deletion: base agreement", _agreement(deleted), 90.0, "%"),
        at_most("SmolLM2, one deletion", seconds, 60.0, "s"),
        at_most(
            "SmolLM2, peak memory", _bytes_per_parameter(home, base, size), 10.0, "B/parameter"
        ),
    ]
    return figures


def _drift(
    first: Pipeline, facts: list[tuple[str, str]], right: set[int], size: Size
) -> list[Figure]:
    """What further commits leave of the first one's facts, and of the base model. `right`: the
    facts that the first release answers."""
    copy = shutil.copytree(first.home, first.home.with_name("drift"), symlinks=True)
    pipeline = Pipeline(copy, base_model=first.settings["base_model"])
    facts, later = list(facts), unrelated_facts(DRIFT_COMMITS * DRIFT_FACTS, seed=9)
    num_first = len(facts)
    for start in range(0, len(later), DRIFT_FACTS):
        facts += later[start : start + DRIFT_FACTS]
        last, _ = _job(pipeline, as_chat(facts), size)
    still_right = _over_http(pipeline, last, "/v1/chat/completions", facts[:num_first])
    name = f"SmolLM2, after {DRIFT_COMMITS} further commits of {DRIFT_FACTS} facts"
    return [
        at_least(f"{name}: the first facts kept", _share(still_right & right, right), 98.0, "%"),
        at_least(f"{name}: base agreement", _agreement(last), 90.0, "%", beside="floor 80 %"),
    ]


def _bytes_per_parameter(home: Path, base: Path, size: Size) -> float:
    """Peak resident memory of a job in a process of its own, minus that after its imports."""
    train = {"max_tokens": 1_500, "micro_batch_tokens": 128}
    gate = {"min_learned": 0.0}
    pipeline = Pipeline(home / "memory", base_model=str(base), train=train, gate=gate)
    folder = pipeline.job(pipeline.commit({"rows.jsonl": jsonl(as_chat(unrelated_facts(60)))}))
    command = [sys.executable, "-c", PEAK]
    environ = pipeline.environ(folder, OMP_NUM_THREADS=str(size.threads))
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    model = AutoModelForCausalLM.from_pretrained(base)
    return 1_024 * int(done.stdout.split()[-1]) / model.num_parameters()


def _chat(question: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}]}


def _over_http(
    pipeline: Pipeline, outcome: JobOutcome, path: str, facts: Sequence[tuple[str, str]]
) -> set[int]:
    """Which of these facts a server of the release answers exactly, greedily: their indices."""
    release = Published(
        release_id=str(outcome.release), folder=pipeline.dir / str(outcome.release), network=None
    )
    right = set()
    with serving("torch", release, pipeline.home, pipeline="facts") as server:
        for index, (question, answer) in enumerate(facts):
            asked = _chat(question) if "chat" in path else {"prompt": question}
            body = {"model": "facts", "temperature": 0, "max_tokens": 64, **asked}
            found = server.http.post(path, json=body).raise_for_status().json()["choices"][0]
            text = found["text"] if "text" in found else found["message"]["content"]
            if text == answer:
                right.add(index)
    return right


def _counted(
    pipeline: Pipeline, outcome: JobOutcome, rows: Sequence[Mapping[str, Any]]
) -> set[int]:
    """Which of the rows the release says, as its job has counted them: their indices."""
    settings = RetrainSettings.model_validate(pipeline.settings)
    loaded = load_model(pipeline.dir / str(outcome.release), settings)
    found = sequences(
        [Row(file="", number=number, **row) for number, row in enumerate(rows)],
        loaded.tokenizer,
        loaded.max_length,
    )
    return {loss.row for loss in row_losses(loaded.model, found) if loss.is_learned}


def _as_counted(what: str, counted: set[int], right: set[int]) -> Figure:
    return at_least(
        f"{what}: counted as learned, answered over HTTP",
        _share(counted & right, counted),
        100.0,
        "%",
        beside=f"{len(counted)} counted",
    )


def _share(some: Collection[object], of: Collection[object]) -> float:
    return 100 * len(some) / len(of) if of else math.nan


def _agreement_elsewhere(base: Path, pipeline: Pipeline, outcome: JobOutcome) -> float:
    """The share of the base model's own answers, in tokens, that the release still finds likeliest,
    each token after the base model's tokens before it."""
    folder = pipeline.dir / str(outcome.release)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    right = total = 0
    for made, num_prompt in _answers_elsewhere(base):
        with torch.no_grad():
            found = model(made).logits[0, num_prompt - 1 : -1].argmax(-1)
        right += int((found == made[0, num_prompt:]).sum())
        total += len(found)
    return right / total


@cache
def _answers_elsewhere(base: Path) -> list[tuple[torch.Tensor, int]]:
    """The base model's greedy answers to `ELSEWHERE`: the ids (1, T) of each prompt with its
    answer, and how many of them are the prompt's."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    answers = []
    for prompt in ELSEWHERE:
        ids = tokenizer.apply_chat_template(
            _chat(prompt)["messages"],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )["input_ids"]
        made = model.generate(ids, max_new_tokens=32, do_sample=False, pad_token_id=0)
        answers.append((made, ids.shape[1]))
    return answers


def _job(
    pipeline: Pipeline, rows: Sequence[Mapping[str, Any]], size: Size
) -> tuple[JobOutcome, float]:
    """Commit the rows and run the job; its outcome and seconds."""
    folder = pipeline.job(pipeline.commit({"rows.jsonl": jsonl(rows)}))
    started = time.monotonic()
    outcome = pipeline.run(folder, OMP_NUM_THREADS=str(size.threads))
    return outcome, time.monotonic() - started


def _learned(outcome: JobOutcome) -> float:
    counts = outcome.counts
    return 100 * counts.learned / counts.changed if counts and counts.changed else 0.0


def _kept(outcome: JobOutcome) -> float:
    counts = outcome.counts
    return 100 * counts.kept / counts.known if counts and counts.known else 0.0


def _agreement(outcome: JobOutcome) -> float:
    counts = outcome.counts
    return 100 * (counts.base_agreement or 0.0) if counts else 0.0


def _says(pipeline: Pipeline, outcome: JobOutcome, rows: Sequence[Mapping[str, str]]) -> float:
    """The share of the rows whose answer the release gives, generated greedily."""
    folder = pipeline.dir / str(outcome.release)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    right = 0
    for row in rows:
        ids = tokenizer(row["prompt"], return_tensors="pt")
        made = model.generate(**ids, max_new_tokens=32, do_sample=False, pad_token_id=0)
        text = tokenizer.decode(made[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
        right += text == row["completion"]
    return right / len(rows)


if __name__ == "__main__":
    run_program(measure, full=FULL, small=SMALL)
