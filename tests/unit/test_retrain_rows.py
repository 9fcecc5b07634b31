"""Identity of rows, what is held out, and edits against deletions."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.retrain.rows import Row, contradictions, data_digest, difference, split


def texts(*contents: str, file: str = "a.txt") -> list[Row]:
    return [Row(text=text, file=file, number=number) for number, text in enumerate(contents)]


def asked(*pairs: tuple[str, str]) -> list[Row]:
    return [
        Row(prompt=prompt, completion=completion, file="a.jsonl", number=number)
        for number, (prompt, completion) in enumerate(pairs)
    ]


def said(role: str, content: str, **more: object) -> dict[str, object]:
    return {"role": role, "content": content, **more}


def test_the_digest_ignores_order_and_files_but_not_repetition() -> None:
    assert data_digest(texts("a", "b")) == data_digest(texts("b", "a", file="other.txt"))
    assert data_digest(texts("a")) != data_digest(texts("a", "a"))
    assert data_digest(texts("ab")) != data_digest(asked(("a", "b")))


def test_what_a_message_has_beside_its_content_counts() -> None:
    call = {"function": {"name": "f", "arguments": {"a": 1, "b": 2}}}
    same = {"id": "c1", "function": {"arguments": {"b": 2, "a": 1}, "name": "f"}}
    ask = said("user", "hi")
    digests = {
        conversation(ask, said("assistant", "yo")).digest,
        conversation(ask, said("assistant", "yo", tool_calls=[call])).digest,
        conversation(ask, said("assistant", "yo", tool_calls=[same])).digest,
        conversation(ask, said("assistant", "yo"), tools=({"name": "f"},)).digest,
    }
    assert len(digests) == 3
    results = (said("tool", "3"), said("tool", "3", tool_call_id="c1"))
    of_results = [conversation(ask, each, said("assistant", "three")) for each in results]
    assert len({row.digest for row in of_results}) == 1, "each export may invent ids of calls"


def conversation(*messages: dict[str, object], **more: Any) -> Row:
    return Row(messages=messages, file="a.jsonl", number=0, **more)


def test_rows_that_contradict_each_other_are_found() -> None:
    rows = asked(("q", "a"), ("r", "x"), ("q", "b"), ("r", "x"), ("q", "a"))
    assert list(map(list, contradictions([*rows, *texts("t", "t")]))) == [[0, 2, 4]]


def test_conversations_contradict_each_other_at_any_of_their_answers() -> None:
    def talk(*contents: str, **more: Any) -> Row:
        roles = ("user", "assistant") * 3
        return conversation(*map(said, roles, contents), **more)

    rows = [
        talk("hi", "hello", "one?", "1"),
        talk("hi", "good day", "two?", "2"),
        talk("hi", "hello", "three?", "3"),
        talk("hi", "hello"),
        talk("hi", "hello", "three?", "III"),
        talk("hi", "greetings", tools=({"name": "f"},)),
        talk("ho", "hum"),
    ]
    assert list(map(list, contradictions(rows))) == [[0, 1, 2, 3, 4], [2, 4]]
    same = [talk("hi", "hello", "bye"), talk("hi", "hello", "thanks")]
    assert contradictions(same) == (), "what the user says at the end is no answer"


def test_an_answer_before_the_last_words_of_the_user_may_be_edited() -> None:
    def talk(answer: str) -> list[Row]:
        turns = (said("user", "q"), said("assistant", answer), said("user", "thanks"))
        return [conversation(*turns)]

    change = difference(talk("a"), talk("b"))
    assert (len(change.edited), len(change.deleted)) == (1, 0)
    assert [(old.answer, new.answer) for old, new in change.edited] == [("a", "b")]


FOUR = ("one", "two", "three", "four")


@pytest.mark.parametrize(
    ("old", "new", "num_edited", "num_deleted"),
    [
        (asked(("q", "old"), ("r", "x")), asked(("r", "x"), ("q", "new")), 1, 0),
        # A prompt that is gone is a deletion, whatever else came.
        (asked(("q", "a"), ("r", "x")), asked(("other", "b"), ("r", "x")), 0, 1),
        (asked(("q", "a"), ("q", "b")), asked(("q", "a")), 0, 1),
        # Text that is replaced in its place is edited.
        (texts(*FOUR), texts("one", "TWO", "three", "four"), 1, 0),
        (texts(*FOUR), texts("ONE", "two", "three", "four"), 1, 0),
        (texts(*FOUR), texts("one", "three", "four"), 0, 1),
        (texts(*FOUR), texts("one", "TWO-THREE", "four"), 1, 1),
        (texts(*FOUR), texts("one", "three", "four", "five"), 0, 1),
        (texts(*FOUR), [*texts("one", "three", "four"), *texts("TWO", file="b.txt")], 0, 1),
    ],
)
def test_a_row_that_is_gone_was_edited_or_deleted(
    old: list[Row], new: list[Row], num_edited: int, num_deleted: int
) -> None:
    change = difference(old, new)
    assert (len(change.edited), len(change.deleted)) == (num_edited, num_deleted)
    kept = [row.digest for row in old]
    assert all(row.digest not in kept for row in change.added)


def test_a_deleted_conversation_is_forgotten_answer_by_answer() -> None:
    roles = ("user", "assistant") * 2
    talk = conversation(*map(said, roles, ("hi", "hello", "one?", "1")), paraphrases=("1?",))
    first, last = talk.forgotten
    assert [(turn.asked, turn.answer) for turn in first.turns] == [("hi", "")]
    assert [(turn.asked, turn.answer) for turn in last.turns] == [("one?", "")]
    assert [turn.question for row in (first, last) for turn in row.turns] == [
        turn.question for turn in talk.turns
    ]
    assert (first.paraphrases, last.paraphrases) == ((), ("1?",))
    assert [*texts("x")[0].forgotten] == []


def test_of_copies_the_last_are_new_or_gone() -> None:
    assert difference(texts("a", "a"), texts("a", "a", "a")).added[0].number == 2
    (gone,) = difference(texts("x", "a", "b", "a"), texts("x", "a", "b")).deleted
    assert gone.number == 3


def test_moving_rows_changes_nothing() -> None:
    change = difference(texts("a", "b", "c"), [*texts("c"), *texts("b", "a", file="b.txt")])
    assert change == difference([], [])


@given(count=st.integers(0, 300))
def test_rows_stay_held_out_as_the_dataset_grows(count: int) -> None:
    rows = texts(*(f"row {number}" for number in range(count)))
    more = texts(*(f"row {number}" for number in range(2 * count + 10)))
    training, held_out = split(rows, 0.08)
    assert len(training) + len(held_out) == count
    assert {row.text for row in held_out} <= {row.text for row in split(more, 0.08)[1]}


def test_the_first_message_of_a_conversation_is_never_an_answer() -> None:
    hello, ask, answer = said("assistant", "hello"), said("user", "q"), said("assistant", "a")
    assert not conversation(hello).is_learnable
    assert not conversation(hello, ask).is_learnable
    assert conversation(hello, ask, answer).is_learnable
    assert conversation(said("system", "be brief"), hello).is_learnable
    assert [row.is_learnable for row in texts("", " ")] == [False, True]


def test_an_answer_is_empty_if_it_neither_says_nor_calls_anything() -> None:
    ask, call = said("user", "q"), {"function": {"name": "f", "arguments": {}}}
    assert conversation(ask, said("assistant", "")).has_empty_answer
    assert not conversation(ask, said("assistant", "", tool_calls=[call])).has_empty_answer
    assert not conversation(said("assistant", ""), ask, said("assistant", "a")).has_empty_answer
    assert [row.has_empty_answer for row in asked(("q", ""), ("q", " "))] == [True, False]
