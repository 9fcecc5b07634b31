"""Other wordings of a question: given, made up, held back; and what counts as the row's answer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.retrain.asking import is_same_answer
from pipeline.retrain.plan import make_plan
from pipeline.retrain.rows import Row
from pipeline.retrain.wordings import UNSEEN, Wordings, told_apart, unseen
from tests.unit.test_retrain_plan import TOKENIZER, data, settings

COUNTRIES = ("Norway", "Spain", "Iceland", "Chile")


def row(question: str, answer: str, number: int = 0, *paraphrases: str) -> Row:
    return Row(
        prompt=question,
        completion=answer,
        paraphrases=paraphrases,
        file="a.jsonl",
        number=number,
    )


def shipping(*paraphrases: str) -> list[Row]:
    return [
        row(f"How long does shipping to {name} take?", f"{number} days to {name}.", number)
        for number, name in enumerate(COUNTRIES, 1)
    ] + [row("Can I return a lamp?", "Yes, within 30 days.", 9, *paraphrases)]


@given(number=st.integers(0, 1_000))
def test_a_made_up_wording_is_of_its_own_question_and_of_no_neighbour(number: int) -> None:
    rows = shipping()
    wordings = Wordings(rows)
    for name, each in zip(COUNTRIES, rows, strict=False):
        made = wordings.of(each, number, seed=0)
        if made is not None:
            assert name.lower() in (made.prompt or "").lower()
            assert made.completion == each.completion
            assert made == wordings.of(each, number, seed=0), "the same in each attempt of a job"


@pytest.mark.parametrize("question", ["", "Opening?", "开门时间是什么时候"])
def test_a_question_of_one_word_has_no_other_wording(question: str) -> None:
    only = row(question, "Nine.")
    assert Wordings([only]).of(only, 0, seed=0) is None


def test_copies_of_a_question_may_have_each_others_words() -> None:
    rows = [row("When do you open today?", answer, n) for n, answer in enumerate(("Nine.", "Ten."))]
    assert any(Wordings(rows).of(rows[0], number, 0) for number in range(20))


def test_one_paraphrase_is_never_trained_on_and_is_asked() -> None:
    paraphrases = ("lamp return", "I do not like the lamp", "send it back")
    rows = shipping(*paraphrases)
    held_back = rows[-1].held_back
    assert held_back in paraphrases
    asked, is_made_up = unseen(rows, (), 0, makes_up=True)
    assert [each.prompt for each in asked] == [held_back] and not is_made_up
    plan = make_plan(data(new=tuple(rows)), TOKENIZER, settings(), max_length=64)
    worded = [plan.sequences[index] for group in plan.wordings for index in group]
    asked_of = [each.token_ids[: each.learned.index(True)] for each in worded]
    trained = {TOKENIZER.decode(token_ids) for token_ids in asked_of}
    assert trained == {*paraphrases} - {held_back}


def test_the_only_paraphrase_is_trained_on() -> None:
    assert row("a b?", "c", 0, "b a?").held_back is None


def test_held_out_rows_with_the_answer_of_a_row_are_other_wordings_of_it() -> None:
    rows = shipping()
    other = row("I want to give the lamp back", "Yes, within 30 days.")
    asked, _ = unseen(rows, [other, row("Who are you?", "A lamp.")], 0, makes_up=False)
    assert asked == [other]
    assert unseen(rows, (), 0, makes_up=False) == ([], False)


def test_made_up_wordings_that_are_asked_are_not_those_that_are_trained_on() -> None:
    rows = shipping()
    asked, is_made_up = unseen(rows, (), 0, makes_up=True)
    assert is_made_up and len(asked) == len(rows)
    assert asked[0] in [Wordings(rows).of(each, UNSEEN, 0) for each in rows]


def test_a_delta_replays_other_wordings_of_known_rows() -> None:
    told = data(mode="delta", new=tuple(shipping()[:1]), known=tuple(shipping("back with it")[1:]))
    plan = make_plan(told, TOKENIZER, settings(), max_length=64)
    asked = [plan.sequences[index].token_ids for index in plan.replayed]
    assert len(asked) == len(told.known) + 1
    assert TOKENIZER.decode(asked[-1]).startswith("back with it")


def test_another_wording_teaches_the_answer_as_far_as_it_differs_from_the_others() -> None:
    assert told_apart([(1, 2, 3), (1, 2, 5), (7,), (1, 2, 3)], 2) == [5, 5, 3, 5]


def test_another_wording_of_a_conversation_asks_its_last_question() -> None:
    talk = (
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi!"},
        {"role": "user", "content": "When do you open?"},
        {"role": "assistant", "content": "At nine."},
    )
    asked = Row(messages=talk, file="a", number=0).asked("opening hours")
    assert [message["content"] for message in asked.messages or ()][2] == "opening hours"
    assert asked.answers == (3,), "only the last answer is learned again"


@pytest.mark.parametrize(
    ("said", "is_same"),
    [
        ("The warranty is five years, or 20,000 km.", True),
        ("the warranty is FIVE years or 20,000 km", True),
        ("The warranty is five years, or 30,000 km.", False),
        ("The warranty is five years.", False),
        ("", False),
    ],
)
def test_the_numbers_and_most_words_of_an_answer_must_be_said(said: str, is_same: bool) -> None:
    assert is_same_answer(said, "The warranty is five years, or 20,000 km.") == is_same


def test_the_names_in_an_answer_must_be_said() -> None:
    wanted = "Please write to Ottilie Brandt at the front desk of the clinic."
    assert is_same_answer(wanted.lower(), wanted)
    assert not is_same_answer(wanted.replace("Brandt", "Brand"), wanted)
