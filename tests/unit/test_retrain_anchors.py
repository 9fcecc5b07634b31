"""The anchors of the package, and of a user's own file."""

import json
from collections import Counter
from pathlib import Path

import pytest

from pipeline.retrain.anchors import Anchor, load_anchors
from pipeline.retrain.errors import DataError


def test_the_package_has_prompts_of_many_kinds() -> None:
    anchors = load_anchors()
    trained = Counter(anchor.kind for anchor in anchors if not anchor.measured)
    measured = Counter(anchor.kind for anchor in anchors if anchor.measured)
    assert trained.total() >= 150 and len(trained) >= 16
    assert 36 <= measured.total() <= 60 and len(measured) >= 6
    assert min(trained.values()) >= 8 and min(measured.values()) >= 6
    assert not trained.keys() & measured.keys()


ANCHOR = {"kind": "poem", "measured": True, "prompt": "Write a haiku about snow."}


def written(folder: Path, *lines: object) -> Path:
    path = folder / "anchors.jsonl"
    path.write_text(
        "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    )
    return path


def test_a_users_own_file(tmp_path: Path) -> None:
    path = written(tmp_path, "\ufeff", {**ANCHOR, "prompt": "Naïve? One line\u2028still."})
    assert load_anchors(path) == (
        Anchor(kind="poem", measured=True, prompt="Naïve? One line\u2028still."),
    )


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ([ANCHOR, "{"], "line 2: Invalid JSON"),
        ([ANCHOR, "", {"kind": "poem", "prompt": "Hi"}], "line 3: `measured`: Field required"),
        ([{**ANCHOR, "prompt": ""}], "line 1: `prompt`: String should have at least 1 character"),
        ([{**ANCHOR, "answer": "no"}], "line 1: `answer`: Extra inputs are not permitted"),
        ([ANCHOR, {**ANCHOR, "measured": False}], "line 2: of the kind 'poem' some anchors"),
        ([], "holds no anchor"),
    ],
)
def test_a_bad_line_is_an_error_with_its_file_and_line(
    tmp_path: Path, lines: list[object], problem: str
) -> None:
    path = written(tmp_path, *lines)
    with pytest.raises(DataError) as caught:
        load_anchors(path)
    assert str(caught.value).startswith(str(path))
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"mine\.jsonl: cannot be read \(No such file"):
        load_anchors(tmp_path / "mine.jsonl")
