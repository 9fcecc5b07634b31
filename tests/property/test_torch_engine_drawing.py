"""Draws of a batch against a plain reference: the filters on one row at a time, by a full sort."""

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as bounded
from hypothesis import strategies as st

from serving.engine import Generation
from serving.engines.torch_engine.sampling import draw, logprobs, sample
from serving.engines.torch_engine.sequence import EngineSequence
from tests.torch_engine_fixtures import sequence

quickly = bounded(deadline=None, max_examples=40)
WIDE = 5000
"""Columns enough for the search by groups, and not a multiple of a block."""


def kept(logits: torch.Tensor, generation: Generation) -> dict[int, float]:
    """The distribution that is to be drawn from: token id to probability."""
    scaled = logits.double() / generation.temperature
    weights = (scaled - scaled.max()).exp().tolist()
    best = sorted(range(len(weights)), key=lambda column: -weights[column])
    best = [column for column in best if weights[column] >= generation.min_p]
    best = best[: generation.top_k or None]
    total = sum(weights[column] for column in best)
    nucleus: dict[int, float] = {}
    so_far = 0.0
    for column in best:
        if nucleus and so_far >= generation.top_p * total:
            break
        nucleus[column] = weights[column]
        so_far += weights[column]
    return {column: weight / so_far for column, weight in nucleus.items()}


FILTERS: list[dict[str, Any]] = [
    {},
    {"temperature": 2.5},
    {"temperature": 1e-9},
    {"top_p": 0.9},
    {"top_p": 0.3, "temperature": 1.7},
    {"top_p": 1e-12},
    {"min_p": 0.4},
    {"top_k": 3},
    {"top_k": 40, "temperature": 3.0},
    {"top_k": 70, "top_p": 0.8, "min_p": 0.02, "temperature": 0.6},
]


@pytest.mark.parametrize("settings", FILTERS)
@pytest.mark.parametrize("vocab_size", [50, WIDE])
def test_the_distribution_is_that_of_the_reference(
    vocab_size: int, settings: dict[str, Any]
) -> None:
    """A chi-square test over the tokens of which at least ten are expected, the rest as one."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(vocab_size, generator=generator) * 4
    exact = kept(logits, sequence(**settings).generation)
    rows = [sequence(seed=seed, **settings) for seed in range(100)]
    num_rounds = 40
    found: Counter[int] = Counter()
    for _ in range(num_rounds):
        found.update(sample(rows, logits.expand(len(rows), -1)))
    assert set(found) <= set(exact)
    num_drawn = num_rounds * len(rows)
    expected = {token: share * num_drawn for token, share in exact.items()}
    often = [token for token, count in expected.items() if count >= 10]
    cells = [(found[token], expected[token]) for token in often]
    cells.append((num_drawn - sum(a for a, _ in cells), num_drawn - sum(b for _, b in cells)))
    score = sum((a - b) ** 2 / b for a, b in cells if b > 1e-6)
    freedom = max(1, len(cells) - 1)
    # Four standard deviations of the chi-square distribution; seeds make it the same each time.
    assert score < freedom + 4 * math.sqrt(2 * freedom)


@quickly
@given(
    levels=st.lists(st.integers(-4, 4), min_size=1, max_size=150),
    settings=st.fixed_dictionaries(
        {
            "top_p": st.sampled_from([0.01, 0.5, 0.77, 1.0]),
            "min_p": st.sampled_from([0.0, 0.1, 1.0]),
            "temperature": st.sampled_from([0.3, 1.0, 2.0]),
        }
    ),
    seed=st.integers(-(2**63), 2**63 - 1),
)
def test_ties_and_edges_stay_within_what_is_kept(
    levels: list[int], settings: dict[str, Any], seed: int
) -> None:
    """Many columns are equal here, and a nucleus may end between them."""
    # No share of few columns is exactly a `top_p`, or rounding would decide.
    logits = torch.tensor(levels) * 0.7303
    row = sequence(seed=seed, **settings)
    exact = kept(logits, row.generation)
    for _ in range(5):
        assert sample([row], logits[None])[0] in exact


@quickly
@given(
    st.lists(st.sampled_from([*FILTERS, {"temperature": 0.0}]), min_size=1, max_size=6),
    st.integers(0, 99),
)
def test_no_row_depends_on_the_others(settings: list[dict[str, Any]], seed: int) -> None:
    logits = torch.randn(len(settings), WIDE, generator=torch.Generator().manual_seed(seed))

    def rows() -> list[EngineSequence]:
        return [sequence(seed=seed + i, **each) for i, each in enumerate(settings)]

    together, alone = rows(), rows()
    for _ in range(2):
        one_by_one = [sample([each], logits[row : row + 1])[0] for row, each in enumerate(alone)]
        assert sample(together, logits) == one_by_one


@pytest.mark.parametrize("width", [1, 63, 64, 65, 128, WIDE])
def test_only_what_has_weight_is_drawn(width: int) -> None:
    """The largest number below 1, and 0, at both ends of a row that is mostly zero."""
    weights = torch.zeros(width, width) if width < 200 else torch.zeros(1, width)
    weights.diagonal().fill_(1e-30)
    for number in (0.0, 1 - 2**-53):
        ends = [lambda number=number: number] * len(weights)
        assert draw(weights, [1.0] * len(weights), ends) == list(range(len(weights)))
        assert draw(weights, [0.5] * len(weights), ends) == list(range(len(weights)))


@quickly
@given(
    prompt=st.lists(st.integers(0, 30), min_size=1, max_size=20),
    output=st.lists(st.integers(0, 30), max_size=200),
    penalties=st.tuples(
        st.sampled_from([1.0, 0.5, 1.7]), st.sampled_from([0.0, 0.4]), st.sampled_from([0.0, -0.9])
    ),
    seed=st.integers(0, 99),
)
def test_penalties_are_those_of_the_reference(
    prompt: list[int], output: list[int], penalties: tuple[float, float, float], seed: int
) -> None:
    repetition, frequency, presence = penalties
    logits = torch.randn(2, 31, generator=torch.Generator().manual_seed(seed)) * 3
    settings: dict[str, Any] = {
        "temperature": 0.0,
        "repetition_penalty": repetition,
        "frequency_penalty": frequency,
        "presence_penalty": presence,
        "logit_bias": {3: 1.5, 8: -2.0},
    }
    made = sequence(prompt=tuple(prompt), **settings)
    beside = sequence(temperature=0.0)
    # In two parts, since what was counted is kept from one token to the next.
    for part in (output[: len(output) // 2], output):
        made.output[:] = part
        expected = logits[0].clone()
        for token_id, bias in settings["logit_bias"].items():
            expected[token_id] += bias
        counts = Counter(part)
        for token_id in {*prompt, *part}:
            value = float(expected[token_id])
            value = value / repetition if value > 0 else value * repetition
            expected[token_id] = value
        for token_id, count in counts.items():
            expected[token_id] -= frequency * count + presence
        best = [int(expected.argmax()), int(logits[1].argmax())]
        assert sample([made, beside], logits) == best


@quickly
@given(st.lists(st.integers(0, 6), min_size=1, max_size=40), st.integers(0, 99))
def test_logprobs_are_of_the_whole_distribution(num_top: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(num_top), 4200, generator=generator) * 3
    chosen = torch.randint(0, 4200, (len(num_top),), generator=generator).tolist()
    exact = logits.double().log_softmax(-1)
    for row, found in enumerate(logprobs(chosen, num_top, logits)):
        assert found.token_id == chosen[row]
        assert found.logprob == pytest.approx(float(exact[row, chosen[row]]), abs=1e-5)
        best = exact[row].topk(num_top[row]) if num_top[row] else None
        assert [token for token, _ in found.top] == (best.indices.tolist() if best else [])
        assert [value for _, value in found.top] == pytest.approx(
            best.values.tolist() if best else [], abs=1e-5
        )


LOGITS = torch.tensor([3.0, 2.0, 1.0, 0.0, -1.0])


def test_a_stop_token_is_not_chosen_before_the_least_number_of_tokens() -> None:
    one = sequence(stop_token_ids=(0,), min_tokens=1, top_k=1)
    assert sample([one], LOGITS[None]) == [1]


def test_what_is_sampled_leaves_the_logits_as_they_are() -> None:
    logits = LOGITS.repeat(3, 1)
    chosen = [
        sequence(seed=1, top_p=0.5, min_p=0.2),
        sequence(temperature=0.0),
        sequence(seed=2, logit_bias={1: 5.0}, presence_penalty=1.0, output=(0,)),
    ]
    sample(chosen, logits)
    assert torch.equal(logits, LOGITS.repeat(3, 1))


def test_without_a_seed_each_draw_is_another_and_a_seed_has_its_sign() -> None:
    logits = torch.zeros(2, WIDE)
    assert len({token for _ in range(3) for token in sample([sequence(), sequence()], logits)}) > 1
    one, other = sample([sequence(seed=7), sequence(seed=-7)], logits)
    assert one != other
