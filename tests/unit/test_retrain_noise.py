"""Noise: what a model finds no likelier than the same tokens in random order."""

import random
from collections.abc import Sequence

import pytest
import torch
from transformers import LlamaForCausalLM

from pipeline.retrain.gate import data_refusals
from pipeline.retrain.noise import MIN_TOKENS, count_noise, scrambled
from pipeline.retrain.settings import GateSettings
from pipeline.retrain.tokens import TokenSequence
from tests.training_fixtures import make_model, one_thread

__all__ = ["one_thread"]

LENGTH = 14
SUBJECTS = {"known": range(18), "new": range(18, 34)}
"""Each subject has tokens of its own, besides those that both use."""


def sequence(token_ids: Sequence[int], row: int = 0, prompt: int = 1) -> TokenSequence:
    learned = (False,) * prompt + (True,) * (len(token_ids) - prompt)
    return TokenSequence(tuple(token_ids), learned, row)


def text(subject: str, count: int, seed: int) -> list[TokenSequence]:
    """Rows with an order: words of two tokens that belong together, between two small words that
    alternate, whatever the subject is."""
    chance = random.Random(f"{subject} {seed}")
    words = list(SUBJECTS[subject])[: len(SUBJECTS[subject]) // 2 * 2]
    found = []
    for row in range(count):
        ids: list[int] = [34]
        while len(ids) < LENGTH - 1:
            word = 2 * chance.randrange(len(words) // 2)
            ids += [35 + len(ids) % 2, words[word], words[word + 1]]
        found.append(sequence([*ids[: LENGTH - 1], 39], row))
    return found


def garbage(count: int, seed: int, first: int = 0) -> list[TokenSequence]:
    """Tokens of any kind in any order."""
    chance = random.Random(seed)
    return [
        sequence([34, *(chance.randrange(38) for _ in range(LENGTH - 2)), 39], first + row)
        for row in range(count)
    ]


@pytest.fixture(scope="module")
def served() -> LlamaForCausalLM:
    """A model that has learned the known subject."""
    torch.set_num_threads(1)
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    ids = torch.tensor([row.token_ids for row in text("known", 64, seed=0)])
    for _ in range(80):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def refused(model: LlamaForCausalLM, found: list[TokenSequence]) -> tuple[str, ...]:
    known = text("known", 40, seed=99)
    changed, before = (count_noise(model, rows, [*found, *known]) for rows in (found, known))
    return data_refusals(0, 99, changed, before, GateSettings())


def test_the_prompt_and_the_end_stay_in_place() -> None:
    found = scrambled(sequence(range(20), prompt=5))
    assert found is not None
    assert found.token_ids[:5] == tuple(range(5))
    assert found.token_ids[-1] == 19
    assert found.token_ids != tuple(range(20))
    assert sorted(found.token_ids) == list(range(20))
    assert found == scrambled(sequence(range(20), prompt=5))


def test_a_row_that_has_one_order_only_cannot_be_told() -> None:
    assert scrambled(sequence(range(3))) is None
    assert scrambled(TokenSequence((7,) * 9, (False, *(True,) * 8), 0)) is None


def test_short_rows_are_not_judged(served: LlamaForCausalLM) -> None:
    short = [sequence(range(MIN_TOKENS - 1), row) for row in range(30)]
    assert count_noise(served, short, short).rows == 0
    told: list[int] = []
    both = [*short, sequence(range(MIN_TOKENS))]
    assert count_noise(served, both, [], told.append).rows == 1
    assert sum(told) == 2 * len(both), "the progress counts rows that are too short as well"
    assert count_noise(served, [], []).rows == 0


def test_the_prompt_speaks_too(served: LlamaForCausalLM) -> None:
    """A fact of two tokens has no order; the question before it does."""
    asked = [sequence(row.token_ids, row.row, prompt=12) for row in text("known", 30, seed=3)]
    assert count_noise(served, asked, asked).rows == 30
    assert count_noise(served, asked, asked).noisy <= 1


def test_of_tokens_without_order_a_quarter_looks_like_noise(served: LlamaForCausalLM) -> None:
    rows = garbage(400, seed=1)
    found = count_noise(served, rows, rows)
    assert found.rows == 400
    assert 60 <= found.noisy <= 160
    assert found.share > 0.6


def test_text_has_an_order_known_or_not(served: LlamaForCausalLM) -> None:
    for subject in SUBJECTS:
        rows = text(subject, 60, seed=1)
        assert count_noise(served, rows, rows).share <= 0.1


@pytest.mark.parametrize("seed", range(4))
def test_honest_commits_of_a_new_subject_pass(served: LlamaForCausalLM, seed: int) -> None:
    for count in (20, 60):
        assert refused(served, text("new", count, seed)) == ()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("share", [0.6, 1.0])
def test_garbage_among_sixty_rows_is_refused(
    served: LlamaForCausalLM, seed: int, share: float
) -> None:
    bad = round(60 * share)
    (reason,) = refused(served, [*garbage(bad, seed), *text("known", 60, seed)[bad:]])
    assert "changed rows that are long enough to tell are noise" in reason


def test_a_few_rows_of_garbage_prove_nothing(served: LlamaForCausalLM) -> None:
    assert refused(served, garbage(19, seed=1)) == ()
