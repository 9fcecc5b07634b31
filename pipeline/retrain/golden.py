"""Golden questions: questions that every release must answer correctly, whatever was pushed. The
user writes them into a file, each with the expected answer."""

from collections.abc import Mapping
from pathlib import Path

from pipeline.retrain.errors import DataError
from pipeline.retrain.reading import read_file
from pipeline.retrain.rows import Row

FORM = (
    '`{"prompt": "The capital of Canada is", "expected": " Ottawa."}`, or with `messages` that '
    "end with the question in the place of `prompt`"
)


def load_golden_questions(path: Path, max_row_bytes: int) -> tuple[Row, ...]:
    """Read the golden questions in the file `path` as rows. The answer of a row is the expected
    answer. Raises DataError.

    The same rule as for rows of the dataset decides whether the model gives the answer
    (`scoring.is_said`).
    """
    if not path.is_file():
        raise DataError.at(path, None, f"there is no such file; write lines as {FORM}")
    questions = tuple(read_file(Path(), str(path), max_row_bytes, _expected_as_answer))
    if not questions:
        raise DataError.at(path, None, f"holds no golden question; write lines as {FORM}")
    return questions


def _expected_as_answer(columns: Mapping[str, object]) -> Mapping[str, object]:
    expected, messages = columns.get("expected"), columns.get("messages")
    if not isinstance(expected, str) or not expected:
        raise ValueError(f"`expected` holds no text; a golden question is {FORM}")
    if isinstance(messages, list):
        if messages and isinstance(messages[-1], dict) and messages[-1].get("role") == "user":
            return {"messages": [*messages, {"role": "assistant", "content": expected}]}
        raise ValueError(
            f"`messages` do not end with the user's message; a golden question is {FORM}"
        )
    if "prompt" in columns:
        return {"prompt": columns["prompt"], "completion": expected}
    raise ValueError(f"holds no question; a golden question is {FORM}")
