"""The anchors of the package. A user's own anchors and golden questions; a bad line of them is an
error with its file and line."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.retrain.anchors import Anchor, load_anchors
from pipeline.retrain.errors import DataError
from pipeline.retrain.reading import load_golden_questions as load_golden
from pipeline.retrain.rows import Row


def written(folder: Path, *lines: object) -> Path:
    path = folder / "questions.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts))
    return path


def test_the_package_has_prompts_of_many_kinds() -> None:
    anchors = load_anchors()
    trained = Counter(anchor.kind for anchor in anchors if not anchor.measured)
    measured = Counter(anchor.kind for anchor in anchors if anchor.measured)
    assert trained.total() >= 150 and len(trained) >= 16
    assert 36 <= measured.total() <= 60 and len(measured) >= 6
    assert min(trained.values()) >= 8 and min(measured.values()) >= 6
    assert not trained.keys() & measured.keys()
    assert len({anchor.prompt.casefold() for anchor in anchors}) == len(anchors)


ANCHOR = {"kind": "poem", "measured": True, "prompt": "Write a haiku about snow."}
GOLDEN = {"prompt": "One and one is", "completion": " two."}


def test_anchors_of_a_users_own_file(tmp_path: Path) -> None:
    path = written(tmp_path, "\ufeff", {**ANCHOR, "prompt": "Naïve? One line\u2028still."})
    assert load_anchors(path) == (
        Anchor(kind="poem", measured=True, prompt="Naïve? One line\u2028still."),
    )


def test_golden_questions_are_rows(tmp_path: Path) -> None:
    user = {"role": "user", "content": "Which city is the capital of Canada?"}
    path = written(
        tmp_path,
        {"prompt": "The capital of Canada is", "completion": " Ottawa."},
        {"question": user["content"], "answer": "Ottawa."},
    )
    assert load_golden(path) == (
        Row(prompt="The capital of Canada is", completion=" Ottawa.", file=str(path), number=0),
        Row(
            messages=(user, {"role": "assistant", "content": "Ottawa."}),
            file=str(path),
            number=1,
        ),
    )


@pytest.mark.parametrize(
    ("load", "lines", "problem"),
    [
        (load_anchors, [ANCHOR, "{"], "line 2: Invalid JSON"),
        (load_anchors, [ANCHOR, "", {"kind": "poem", "prompt": "Hi"}], "line 3: `measured`: Field"),
        (load_anchors, [{**ANCHOR, "answer": "no"}], "line 1: `answer`: Extra inputs are not"),
        (load_anchors, [], "holds no anchor"),
        (load_golden, [GOLDEN, {"prompt": "One"}], "line 2: nothing to learn from in the columns"),
        (load_golden, [{**GOLDEN, "prompt": 11}], "line 1: `prompt` holds the value 11, not text"),
        (load_golden, [{"text": "One"}], "line 1: a golden question is a row with a question and"),
        (
            load_golden,
            [{"messages": [{"role": "assistant", "content": "Two."}]}],
            "line 1: a golden question is a row with a question and an answer",
        ),
        (load_golden, [["One and one is"]], "not an object"),
        (load_golden, [], "holds no golden question"),
    ],
)
def test_a_bad_line_is_an_error_with_its_file_and_line(
    tmp_path: Path, load: Callable[[Path], object], lines: list[object], problem: str
) -> None:
    path = written(tmp_path, *lines)
    with pytest.raises(DataError) as caught:
        load(path)
    assert str(caught.value).startswith(str(path))
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"mine\.jsonl: cannot be read \(No such file"):
        load_anchors(tmp_path / "mine.jsonl")
    with pytest.raises(DataError, match=r"mine\.jsonl: there is no such file"):
        load_golden(tmp_path / "mine.jsonl")
