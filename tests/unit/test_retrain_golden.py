"""A user's golden questions are rows; a bad one is an error with its file and line."""

import json
from pathlib import Path

import pytest

from pipeline.retrain.errors import DataError
from pipeline.retrain.reading import load_golden_questions
from pipeline.retrain.rows import Row

LIMIT = 1 << 20


def written(folder: Path, *lines: object) -> Path:
    path = folder / "golden.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_what_is_expected_is_the_answer_of_a_row(tmp_path: Path) -> None:
    system = {"role": "system", "content": "Be brief."}
    user = {"role": "user", "content": "Which city is the capital of Canada?"}
    path = written(
        tmp_path,
        {"prompt": "The capital of Canada is", "expected": " Ottawa."},
        {"messages": [system, user], "expected": "Ottawa."},
    )
    assert load_golden_questions(path, LIMIT) == (
        Row(prompt="The capital of Canada is", completion=" Ottawa.", file=str(path), number=0),
        Row(
            messages=(
                system,
                user,
                {"role": "assistant", "content": "Ottawa."},
            ),
            file=str(path),
            number=1,
        ),
    )


GOOD = {"prompt": "One and one is", "expected": " two."}


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ({"prompt": "One and one is"}, "`expected` holds no text"),
        ({"prompt": "One and one is", "expected": 2}, "`expected` holds no text"),
        ({"prompt": "One and one is", "expected": ""}, "`expected` holds no text"),
        ({"prompt": 11, "expected": " two."}, "`prompt` holds the value 11, not text"),
        ({"text": "One and one", "expected": " is two."}, "holds no question"),
        ({"messages": [], "expected": "Two."}, "`messages` do not end with the user's"),
        (
            {"messages": [{"role": "assistant", "content": "Two."}], "expected": "Two."},
            "`messages` do not end with the user's",
        ),
        (["One and one is"], "not an object"),
    ],
)
def test_a_bad_line_is_an_error_with_its_file_and_line(
    tmp_path: Path, line: object, problem: str
) -> None:
    path = written(tmp_path, GOOD, line)
    with pytest.raises(DataError) as caught:
        load_golden_questions(path, LIMIT)
    assert str(caught.value).startswith(f"{path}, line 2: ")
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_without_a_question_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"golden\.jsonl: holds no golden question"):
        load_golden_questions(written(tmp_path), LIMIT)
    with pytest.raises(DataError, match=r"mine\.jsonl: there is no such file"):
        load_golden_questions(tmp_path / "mine.jsonl", LIMIT)
