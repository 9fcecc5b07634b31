"""Which row a question in other words means."""

from pathlib import Path

import pytest

from pipeline.retrain.rows import Row
from pipeline.retrain.wordings import questions_of
from serving.errors import ReleaseError
from serving.questions import Question, Questions, read_questions, write_questions
from serving.weights.release import QUESTIONS_FILE


def question(*wordings: str, row: str = "a.jsonl, line 1") -> Question:
    return Question(kind="messages", wordings=wordings, row=row)


SHOP = (
    question("How long does delivery to Norway take?", "when does a parcel reach Oslo"),
    question("How long does delivery to Spain take?", "when does a parcel reach Madrid"),
    question("Can I return a lamp?", "send a light back", "I don't like the lamp I bought"),
    question("Wann öffnet die Werkstatt?", "Öffnungszeiten Werkstatt"),
)


@pytest.mark.parametrize(
    ("asked", "number"),
    [
        ("how long does my parcel take to reach Oslo", 0),
        ("MADRID, when does the parcel come?", 1),
        ("I bought a lamp I don't like, can I send it back?", 2),
        ("offnungszeiten der werkstatt bitte", 3),
        ("send a light back", 2),  # a wording of the row
        ("How long does delivery to Norway take?", None),  # the row's own words
        ("When does a parcel reach me?", None),  # as near to Spain as to Norway
        ("Who wrote the play about the prince of Denmark, and when was it printed first?", None),
        ("开门时间是什么时候", None),
        ('return" OR (lamp*', 2),
        ("", None),
    ],
)
def test_a_question_means_the_row_that_has_its_telling_words(
    asked: str, number: int | None
) -> None:
    meant = Questions(SHOP).meant(asked)
    assert meant == (None if number is None else SHOP[number])


def test_a_long_text_is_looked_up_by_its_first_words() -> None:
    asked = " ".join(["Can I return a lamp", *(f"word{number}" for number in range(50_000))])
    assert Questions(SHOP).meant(asked) is None


def chat(question: str, answer: str, number: int, *before: str, **more: object) -> Row:
    earlier = tuple(
        {"role": "user" if n % 2 == 0 else "assistant", "content": text}
        for n, text in enumerate(before)
    )
    talk = (*earlier, {"role": "user", "content": question})
    return Row(
        messages=(*talk, {"role": "assistant", "content": answer}),
        masked=tuple(range(1, len(before), 2)),
        file="a.jsonl",
        number=number,
        line=number,
        **more,  # type: ignore[arg-type]
    )


def test_rows_with_one_answer_are_one_question(tmp_path: Path) -> None:
    rows = [
        chat("Can I pay by card?", "Yes.", 1, paraphrases=("card ok?", "is a card fine")),
        chat("And in the shop?", "No.", 2, "Can I pay by card?", "Yes."),
        chat("Do you take cards?", "Yes.", 3, generated=("cards taken",)),
        Row(prompt="Can I pay by card?", completion="Yes.", file="a.jsonl", number=4),
        Row(text="Cards are fine.", file="a.txt", number=0),
        chat("Sum up this page. " * 100, "Too long.", 5),
    ]
    found = questions_of(rows)
    texts = (
        "Can I pay by card?",
        "card ok?",
        "is a card fine",
        "Do you take cards?",
        "cards taken",
    )
    assert found == (
        question(*texts),
        Question(kind="prompt", wordings=("Can I pay by card?",), row="a.jsonl, row 5"),
    )
    write_questions(tmp_path, found)
    read = read_questions(tmp_path)
    assert read["messages"].meant("do you take a card?") == found[0]
    assert read["prompt"].meant("pay by card") == found[1]


def test_a_release_without_questions_has_none(tmp_path: Path) -> None:
    assert read_questions(tmp_path) == {}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("[{}]", "row_questions.json: 0.kind: Field required"),
        ("no JSON", "row_questions.json: .*expected ident"),
    ],
)
def test_damaged_questions_are_an_error(content: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / QUESTIONS_FILE).write_text(content)
    with pytest.raises(ReleaseError, match=reason):
        read_questions(tmp_path)
