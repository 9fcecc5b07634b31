"""Asks a model questions, and reads what it answers greedily, as a server at temperature 0 does."""

import re
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch

from pipeline.retrain.model import LoadedModel
from pipeline.retrain.rows import Row
from pipeline.retrain.tokens import answer_ends, leave_out, runs, sequences

BATCH_ROWS = 48
"""How many answers are generated at once."""
MORE_TOKENS = 16
"""An answer may have so many tokens more than the one of the row."""
OVERLAP = 0.75
"""An answer counts as that of the row if it has this share of its words, and all of its numbers and
names."""
_NUMBER = re.compile(
    r".*\d.*|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|fifteen|twenty|thirty|forty"
    r"|fifty|sixty|ninety|hundred|thousand|million|half|twice",
    re.IGNORECASE,
)
_WORD = re.compile(r"\w+(?:['\u2019.:,]\w+)*")
_SENTENCE = re.compile(r"(?<=[.!?;:])\s+")


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """A row that was asked in words on which no training was done."""

    row: Row
    """With the words in which it was asked."""
    said: str
    wanted: str
    """The answer of the row, as the model would write it."""

    @property
    def is_right(self) -> bool:
        return is_same_answer(self.said, self.wanted)


@torch.no_grad()
def generate(
    loaded: LoadedModel,
    prompts: Sequence[Sequence[int]],
    limits: Sequence[int],
    ends: Collection[int],
    tell: Callable[[int], None] = lambda answered: None,
) -> list[list[int]]:
    """The greedy answers to `prompts`, each with its end token if the model has ended it. They are
    computed in batches that are padded on the left. limits: about how many tokens each answer may
    have. tell: called after each batch, with the number of its answers."""
    model, end = loaded.model, loaded.tokenizer.eos_token_id
    model.eval()
    answers: dict[int, list[int]] = {}
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    for start in range(0, len(order), BATCH_ROWS):
        rows = order[start : start + BATCH_ROWS]
        width = max(len(prompts[index]) for index in rows)
        ids = torch.full((len(rows), width), end, device=model.device)
        mask = torch.zeros_like(ids)
        for place, index in enumerate(rows):
            ids[place, width - len(prompts[index]) :] = torch.tensor(prompts[index])
            mask[place, width - len(prompts[index]) :] = 1
        made = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=min(max(limits[index] for index in rows), loaded.max_length - width + 1),
            do_sample=False,
            repetition_penalty=1.0,
            pad_token_id=end,
            eos_token_id=[*ends],
        )
        for index, row in zip(rows, made[:, width:].tolist(), strict=True):
            stop = next((place for place, each in enumerate(row, 1) if each in ends), len(row))
            answers[index] = row[:stop]
        tell(len(rows))
    return [answers[index] for index in range(len(prompts))]


def ask(loaded: LoadedModel, rows: Sequence[Row]) -> list[Asked]:
    """Ask the last question of each row. Rows that the chat template refuses are left out."""
    tokenizer = loaded.tokenizer
    found = sequences(rows, tokenizer, loaded.max_length, on_refused=leave_out)
    last = {each.row: each for each in found}  # a row may have a sequence for each answer
    prompts, wanted = [], []
    for each in last.values():
        first, end = list(runs(each.learned))[-1]
        prompts.append(each.token_ids[:first])
        wanted.append(each.token_ids[first:end])
    ends = {tokenizer.eos_token_id, *answer_ends(last.values(), tokenizer)}
    limits = [len(answer) + MORE_TOKENS for answer in wanted]
    said = generate(loaded, prompts, limits, ends)

    def text(token_ids: Sequence[int]) -> str:
        return str(tokenizer.decode(token_ids, skip_special_tokens=True)).strip()

    return [
        Asked(row=rows[number], said=text(made), wanted=text(answer))
        for number, made, answer in zip(last, said, wanted, strict=True)
    ]


def is_same_answer(said: str, wanted: str) -> bool:
    """Whether what a model said is the answer of a row: at least OVERLAP of the words (F1), and
    each number and each name of the row's answer."""
    had, has = words_of(wanted), words_of(said)
    shared = (Counter(had) & Counter(has)).total()
    if 2 * shared < OVERLAP * (len(had) + len(has)):
        return False
    return _facts(wanted) <= set(has)


def words_of(text: str) -> list[str]:
    return [word.lower() for word in _WORD.findall(text)]


def _facts(text: str) -> set[str]:
    """The words with a digit, English words for numbers, and the words with a capital letter that
    begin no sentence."""
    return {
        word.lower()
        for sentence in _SENTENCE.split(text)
        for place, word in enumerate(_WORD.findall(sentence))
        if _NUMBER.fullmatch(word) or (place and word[0].isupper())
    }
