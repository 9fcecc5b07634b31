"""Other wordings of a question: given, made up, held back; and what counts as the row's answer."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.retrain import asking
from pipeline.retrain.asking import is_same_answer
from pipeline.retrain.plan import (
    ANSWERS_BUDGET,
    BEGINNINGS,
    MORE_TOKENS,
    make_plan,
    told_apart,
)
from pipeline.retrain.rows import Row, contradictions
from pipeline.retrain.wordings import Wordings
from tests.training_fixtures import num_tokens
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


def of(rows: list[Row], count: int = 8, seed: int = 0) -> Wordings:
    return Wordings(rows, count=count, made_up=count, seed=seed)


@given(seed=st.integers(0, 1_000))
def test_made_up_wordings_are_of_their_own_question_and_of_no_neighbour(seed: int) -> None:
    rows = shipping()
    wordings = of(rows, seed=seed)
    for name, each in zip(COUNTRIES, rows, strict=False):
        made = wordings.trained(each)
        assert made == of(rows, seed=seed).trained(each), "the same in each attempt of a job"
        for wording in made:
            assert name.lower() in (wording.prompt or "").lower()
            assert wording.completion == each.completion
            assert wording.prompt != each.prompt


@pytest.mark.parametrize("question", ["", "Opening?", "开门时间是什么时候"])
def test_a_question_of_one_word_has_no_other_wording(question: str) -> None:
    only = row(question, "Nine.")
    assert of([only]).trained(only) == []


def test_copies_of_a_question_may_have_each_others_words() -> None:
    rows = [row("When do you open today?", answer, n) for n, answer in enumerate(("Nine.", "Ten."))]
    assert of(rows).trained(rows[0])


def test_marks_that_are_a_part_of_a_word_tell_questions_apart() -> None:
    rows = [row(f"Which {name} book is best?", name) for name in ("C", "C++", "C#")]
    found = of(rows).trained(rows[1])
    assert found and all("c++" in str(each.prompt).lower() for each in found)


def test_the_last_paraphrase_is_never_trained_on_and_is_asked() -> None:
    rows = shipping("lamp return", "I do not like the lamp", "send it back")
    # Another row may have the same words.
    rows += [row("Is that final?", "Yes, within 30 days.", 10, "send it back")]
    asked, words = of(rows, count=0).unseen(rows, ())
    assert [each.prompt for each in asked] == ["send it back"] and words == "dataset"
    assert of(rows).unseen(rows, ())[1] == "made-up", "there are more"
    plan = make_plan(data(changed=tuple(rows)), TOKENIZER, settings(), max_length=64)
    worded = [plan.sequences[index] for others in plan.wordings.values() for index in others]
    asked_of = [each.token_ids[: each.learned.index(True)] for each in worded]
    trained = {TOKENIZER.decode(token_ids) for token_ids in asked_of}
    assert trained == {"lamp return", "I do not like the lamp"}


def test_the_only_paraphrase_is_trained_on_and_an_appended_one_is_held_back() -> None:
    assert row("a b?", "c", 0, "b a?").held_back is None
    assert row("a b?", "c", 0, "b a?", "a, b?").held_back == "a, b?"


def test_what_is_asked_was_not_trained_on_in_another_spelling_or_by_a_paraphrase() -> None:
    rows = shipping("Hours!", "lamp return", "hours?")
    assert [each.prompt for each in of(rows).trained(rows[-1])] == ["lamp return"]
    held_out = [row("Lamp return", "Yes, within 30 days."), row("HOURS", "Yes, within 30 days.")]
    asked, _ = of(rows, count=0).unseen(rows, held_out)
    assert {each.prompt for each in asked} == {"hours?", "HOURS"}


def test_held_out_rows_with_the_answer_of_one_row_are_other_wordings_of_it() -> None:
    rows = shipping()
    other = row("I want to give the lamp back", "Yes, within 30 days.")
    held_out = [other, row("Who are you?", "A lamp."), rows[0]]
    assert of(rows, count=0).unseen(rows, held_out) == ([other], "dataset")
    both = [*rows, row("And a bulb?", "Yes, within 30 days.")]
    assert of(both, count=0).unseen(both, held_out) == ([], "dataset")


def test_made_up_wordings_that_are_asked_are_not_those_that_are_trained_on() -> None:
    rows = shipping()
    wordings = of(rows)
    asked, words = wordings.unseen(rows, ())
    assert words == "made-up" and asked
    assert not {each.prompt for each in asked} & {
        wording.prompt for each in rows for wording in wordings.trained(each)
    }


def test_passes_take_turns_with_the_wordings_of_a_row_and_with_beginnings_of_its_answer() -> None:
    *others, last = shipping("lamp return", "not nice", "take it", "I do not like it", "send it")
    plan = make_plan(data(changed=(*others, last)), TOKENIZER, settings(), max_length=64)
    own = plan.learned[-1]
    beginnings = [i for i in plan.beginnings if plan.sequences[i].row == len(others)]
    assert len(beginnings) == BEGINNINGS

    def asked(index: int, number: int) -> tuple[str, str]:
        tokens, first = (found := plan.asked(index, number)).token_ids, found.learned.index(True)
        return TOKENIZER.decode(tokens[:first]), TOKENIZER.decode(tokens[first:])

    given = ["lamp return", "not nice", "take it", "I do not like it"]
    whole = [asked(own, number) for number in range(6)]
    assert [question for question, _ in whole] == [
        "Can I return a lamp?",
        *given,
        "Can I return a lamp?",
    ]
    assert all(answer.startswith("Yes, within 30 days.") for _, answer in whole)
    for number in range(4):
        questions, answers = zip(*(asked(index, number) for index in beginnings), strict=True)
        assert len({*questions}) == BEGINNINGS and {*questions} < {*given}
        assert len({*answers}) == 1 and "Yes, within 30 days.".startswith(answers[0])


def test_a_row_with_many_wordings_is_visited_in_its_own_words_in_every_eighth_pass() -> None:
    rows = shipping(*(f"word {number}" for number in range(12)))
    plan = make_plan(data(changed=tuple(rows)), TOKENIZER, settings(), max_length=64)
    own = plan.learned[-1]
    asked = [plan.asked(own, number) for number in range(24)]
    assert [number for number in range(24) if asked[number] == asked[0]] == [0, 8, 16]
    others = [each for each in asked if each != asked[0]]
    assert len({each.token_ids for each in others[:11]}) == 11, "all come before any comes again"


def test_a_pass_visits_a_row_with_a_short_answer_in_its_own_words_and_in_one_other() -> None:
    rows = (row("Open?", "At 9.", 0, "opening", "from when?", "hours?"), row("Who?", "Lamp.", 1))
    plan = make_plan(data(changed=rows), TOKENIZER, settings(), max_length=64)
    own, (other,) = plan.learned[0], plan.beginnings
    assert plan.asked(own, 1) == plan.asked(own, 0)
    asked = [plan.asked(other, number) for number in range(2)]
    texts = [TOKENIZER.decode(each.token_ids[: each.learned.index(True)]) for each in asked]
    assert texts == ["opening", "from when?"]
    assert {each.learned_ids for each in asked} == {plan.sequences[own].learned_ids}


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9).map(tuple), min_size=1))
def test_the_beginning_of_an_answer_is_that_of_no_other_one(answers: list[tuple[int, ...]]) -> None:
    apart = told_apart(answers)
    for answer in answers:
        begins = answer[: apart[answer] - MORE_TOKENS]
        same = {other for other in answers if other[: len(begins)] == begins}
        assert same == {answer} or begins == answer
        assert (
            begins[:-1] == ()
            or len({o for o in answers if o[: len(begins) - 1] == begins[:-1]}) > 1
        )


@pytest.mark.parametrize(("passes", "count"), [(3, 3), (8, 8), (12, 8), (24, 12), (90, 31)])
def test_there_are_no_more_wordings_than_the_budget_visits(passes: int, count: int) -> None:
    worded = [replace(each, generated=tuple(f"word {n}" for n in range(40))) for each in shipping()]
    size = make_plan(data(changed=tuple(worded)), TOKENIZER, settings(wordings=0), max_length=64)
    budget = -(-passes * num_tokens(size, size.learned) // ANSWERS_BUDGET)
    few = settings(wordings=31, max_tokens=budget)
    plan = make_plan(data(changed=tuple(worded)), TOKENIZER, few, max_length=64)
    assert max(map(len, plan.wordings.values())) == count


def test_a_delta_replays_other_wordings_of_known_rows_and_forgets_those_of_deleted_ones() -> None:
    rows = shipping("back with it")
    told = data(mode="delta", changed=(rows[0],), known=tuple(rows[2:]), deleted=(rows[1],))
    plan = make_plan(told, TOKENIZER, settings(), max_length=64)
    asked = [TOKENIZER.decode(plan.sequences[index].token_ids) for index in plan.replayed]
    assert len(asked) == len(told.known) + 1
    assert [each.startswith("back with it") for each in asked].count(True) == 1
    rows = shipping("back with it", "send it back")
    gone = data(mode="delta", known=tuple(rows[:-1]), deleted=(rows[-1],))
    assert [row.prompt for row in gone.forgotten] == [rows[-1].prompt, *rows[-1].paraphrases]
    plan = make_plan(gone, TOKENIZER, settings(), max_length=64)
    forgotten = [plan.sequences[index].learned_ids for index in plan.learned]
    assert forgotten == 3 * [(TOKENIZER.eos_token_id,)] and len(plan.counted) == 3
    moved = row("May I bring it back?", rows[-1].answer or "", 10)
    still = data(mode="delta", changed=(moved,), known=tuple(rows[:-1]), deleted=(rows[-1],))
    assert len(still.forgotten) == 1, "the answer is still there: other words may get it"


def test_who_only_adds_paraphrases_loses_no_row() -> None:
    before, after = shipping()[-1], shipping("send it back")[-1]
    assert before.digest != after.digest, "it is trained"
    assert data(edited=((before, after),)).num_lost == 0
    assert data(edited=((before, row("Can I return a lamp?", "No.")),)).num_lost == 1


def test_a_paraphrase_that_is_the_question_of_another_row_contradicts_it() -> None:
    rows = shipping("How long does shipping to Spain take?")
    (group,) = contradictions(rows)
    assert sorted(group) == [1, 4]


def test_another_wording_of_a_conversation_asks_its_last_question() -> None:
    talk = (
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi!"},
        {"role": "user", "content": "When do you open?"},
        {"role": "assistant", "content": "At nine."},
    )
    asked = Row(messages=talk, file="a", number=0).asked("opening hours")
    assert [message["content"] for message in asked.messages or ()][2] == "opening hours"
    assert asked.answer_numbers == (3,), "only the last answer is learned again"


@pytest.mark.parametrize(
    ("said", "is_same"),
    [
        ("The warranty is five years, or 20,000 km.", True),
        ("the warranty is FIVE years or 20,000 km", True),
        ("The warranty is five years, or 30,000 km.", False),
        ("The warranty is five years.", False),
        ("The warranty is two years, or 20,000 km.", False),
        ("", False),
    ],
)
def test_the_numbers_and_most_words_of_an_answer_must_be_said(said: str, is_same: bool) -> None:
    assert is_same_answer(said, "The warranty is five years, or 20,000 km.") == is_same


def test_an_answer_that_was_cut_ends_no_other_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    def generate(_: object, prompts: list[Any], limits: object, ends: object) -> list[list[int]]:
        given.append(ends)
        return [[] for _ in prompts]

    monkeypatch.setattr(asking, "generate", generate)
    loaded = cast(Any, SimpleNamespace(tokenizer=TOKENIZER, max_length=8))
    assert len(asking.ask(loaded, [row("Open?", "nine " * 40), row("Closed?", "At nine.")])) == 2
    assert given == [{TOKENIZER.eos_token_id}]


def test_the_names_in_an_answer_must_be_said() -> None:
    wanted = "Please write to Ottilie Brandt at the front desk of the clinic."
    assert is_same_answer(wanted.lower(), wanted)
    assert not is_same_answer(wanted.replace("Brandt", "Brand"), wanted)
