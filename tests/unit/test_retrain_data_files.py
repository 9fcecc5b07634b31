"""Which files are data, and which of them are held out."""

from collections.abc import Mapping
from typing import Any

import pytest

from pipeline.retrain.dataset import CARD, KEYWORDS, SET_OFF_BY, Split, sort_files
from pipeline.retrain.errors import DataError
from pipeline.retrain.settings import DataSettings


def splits(*files: str, card: str = "", **given: Any) -> Mapping[Split, tuple[str, ...]]:
    found = sort_files(files, DataSettings.model_validate(given), card).splits
    return {split: names for split, names in found.items() if names}


NO_DATA = {
    "README.md": "about the repository",
    "readme.txt": "about the repository",
    "LICENSE": "about the repository",
    "LICENSE-MIT.txt": "about the repository",
    "CHANGELOG.txt": "about the repository",
    "requirements-dev.txt": "about the repository",
    "dataset_infos.json": "settings of a program",
    "a/dataset_info.json": "settings of a program",
    ".gitattributes": "hidden",
    ".github/a.json": "hidden",
    "a/.hidden.csv": "hidden",
    "__pycache__/a.json": "in a folder that begins with __",
    "script.py": "no rows are read from .py files",
    "script.py.gz": "no rows are read from .py files",
    "Makefile": "its name has no suffix",
    "a.parquet.gz": "parquet is compressed inside, and is not read from a compressed file",
}


def test_what_is_ignored_is_told_with_the_reason() -> None:
    data = ("data/a.jsonl", "notes.TXT", "licenses.csv", "authors.txt", "b.json.gz", "c.tsv.zst")
    found = sort_files([*NO_DATA, *data], DataSettings())
    assert found.ignored == NO_DATA
    assert set(found.splits["train"]) == set(data)


def test_settings_choose_files_and_may_name_any() -> None:
    found = sort_files(
        ["a.jsonl", "old/b.jsonl", "LICENSE.txt", "README.txt"],
        DataSettings(files=("*.jsonl", "*.txt", "LICENSE.txt")),
    )
    assert found.splits["train"] == ("LICENSE.txt", "a.jsonl")
    assert found.ignored["old/b.jsonl"] == "not in [pipelines.data] files"
    assert splits("a/b/c.csv", "d.csv", files=["a/"]) == {"train": ("a/b/c.csv",)}
    with pytest.raises(DataError, match=r"\[pipelines.data\] files: \'\*\*.csv\' is no pattern"):
        splits("a.csv", files=["**.csv"])
    with pytest.raises(
        DataError, match=r"files: 'notes.md' has no rows; they are read from .jsonl,"
    ):
        splits("a.csv", "notes.md", files=["a.csv", "notes.md"])


@pytest.mark.parametrize(
    ("file", "split"),
    [
        ("data/validation-00000-of-00001.parquet", "validation"),
        ("data/test_sft-00000-of-00001-3a4b.parquet", "test"),
        ("my-eval.jsonl", "test"),
        ("dev/a.jsonl", "validation"),
        ("dev/train.jsonl", "validation"),
        ("a/val_2/b.jsonl.gz", "validation"),
        ("contest/a.csv", "train"),
        ("validations.csv", "train"),
        ("train_test.csv", "train"),
        ("TEST.csv", "test"),
        ("Dev/a.csv", "validation"),
    ],
)
def test_names_hold_out_what_they_hold_out_for_datasets(file: str, split: Split) -> None:
    """And names with capital letters, which `datasets` does not know."""
    found = splits(file, "more.jsonl")
    assert file in found[split]
    assert "more.jsonl" in found["train"]


def test_the_keywords_are_those_of_datasets() -> None:
    from datasets.data_files import NON_WORDS_CHARS, SPLIT_KEYWORDS

    assert {split: list(words) for split, words in KEYWORDS.items()} == SPLIT_KEYWORDS
    assert SET_OFF_BY == NON_WORDS_CHARS


def test_settings_overrule_names() -> None:
    files = ("facts.jsonl", "test.jsonl", "held/a.jsonl")
    assert splits(*files, splits={"train": ["**"]}) == {"train": tuple(sorted(files))}
    assert splits(*files, splits={"validation": ["held/*"]}) == {
        "train": ("facts.jsonl", "test.jsonl"),
        "validation": ("held/a.jsonl",),
    }
    found = sort_files(files, DataSettings.model_validate({"splits": {"train": ["facts.*"]}}))
    assert found.ignored["test.jsonl"] == "in no split of [pipelines.data.splits]"


ONE_CONFIG = """---
license: mit
configs:
- config_name: default
  data_files:
  - split: train
    path: ["facts/*", "more.jsonl"]
  - split: dev
    path: held.jsonl
---
# Facts
"""


def test_the_dataset_card_says_what_is_held_out() -> None:
    files = ("facts/test.jsonl", "more.jsonl", "held.jsonl", "draft.jsonl", CARD)
    found = sort_files(files, DataSettings(), ONE_CONFIG)
    assert found.splits["train"] == ("facts/test.jsonl", "more.jsonl")
    assert found.splits["validation"] == ("held.jsonl",)
    assert found.ignored["draft.jsonl"] == "not among the data_files of README.md"
    assert sort_files(files, DataSettings(), f"\n {ONE_CONFIG}") == found, "as on the Hub"


SEVERAL = """---
configs:
- config_name: fr
  data_files: fr.csv
- config_name: en
  data_files:
  - split: train
    path: en/a.csv
  - split: test
    path: en/test.csv
{default}---
"""


def test_of_several_configs_all_are_read_unless_one_is_the_default_or_asked_for() -> None:
    files = ("fr.csv", "en/a.csv", "en/test.csv", "other.csv")
    card = SEVERAL.format(default="")
    assert splits(*files, card=card) == {"train": ("en/a.csv", "fr.csv"), "test": ("en/test.csv",)}
    assert splits(*files, card=SEVERAL.format(default="  default: true\n")) == {
        "train": ("en/a.csv",),
        "test": ("en/test.csv",),
    }
    assert splits(*files, card=card, config="fr") == {"train": ("fr.csv",)}
    with pytest.raises(
        DataError, match=r"config is \'de\', and README.md of the dataset has fr, en"
    ):
        splits(*files, card=card, config="de")


def test_a_folder_of_a_config_is_refused_by_name() -> None:
    card = "---\nconfigs:\n- config_name: a\n  data_dir: en\n---\n"
    with pytest.raises(DataError, match=r"^README.md: .* `data_dir: en`.* use `data_files`"):
        splits("en/a.csv", card=card)
    assert splits("en/a.csv", card=card, splits={"test": ("b.csv",)})


def test_a_card_that_says_nothing_of_files_changes_nothing() -> None:
    for card in ("# Facts", "---\nlicense: mit\n---\n", "---\nconfigs:\n- config_name: a\n---\n"):
        assert splits("a.csv", "test.csv", card=card) == {
            "train": ("a.csv",),
            "test": ("test.csv",),
        }


def test_a_broken_card_is_named() -> None:
    twice = "  - split: train\n    path: a.csv\n  - split: train\n    path: b.csv\n"
    for head in (
        "configs: [\n",
        "configs:\n- config_name: a\n  data_files: 3\n",
        f"configs:\n- config_name: a\n  data_files:\n{twice}",
    ):
        with pytest.raises(DataError, match=r"^README.md: its head cannot be understood"):
            splits("a.csv", card=f"---\n{head}---\n")


def test_a_card_with_a_very_long_head_is_read() -> None:
    """`push_to_hub` writes such a head for a dataset with thousands of columns."""
    card = (
        "---\ntags:\n" + "- x\n" * 30_000 + "configs:\n- config_name: b\n  data_files: b.csv\n---\n"
    )
    assert splits("a.csv", "b.csv", card=card) == {"train": ("b.csv",)}
