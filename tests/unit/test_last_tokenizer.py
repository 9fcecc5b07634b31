"""A swap loads a tokenizer where there is another one, and not where there is the same."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from serving.errors import ReleaseError
from serving.tokenizer import LastTokenizer
from serving.weights.publish import publish_state_dict
from serving.weights.release import Release
from tests.serving_fixtures import byte_tokenizer

CONFIG = {"vocab_size": 258, "max_position_embeddings": 64, "eos_token_id": 256}


def published(
    home: Path, seed: int, change: Callable[[Path], object] | None = None
) -> tuple[Release, Path]:
    files = home / f"files-{seed}"
    files.mkdir()
    (files / "config.json").write_text(json.dumps(CONFIG))
    byte_tokenizer().save(str(files / "tokenizer.json"))
    (files / "README.md").write_text("the first")
    if change is not None:
        change(files)
    weights = {"a": torch.rand(4, 4, generator=torch.Generator().manual_seed(seed))}
    release = publish_state_dict(home / "releases", weights, files_dir=files)
    return release, home / "releases" / release.id


def write(name: str, text: str) -> Callable[[Path], object]:
    return lambda files: (files / name).write_text(text)


def add_a_token(files: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["hello"])
    tokenizer.save(str(files / "tokenizer.json"))


@pytest.mark.parametrize(
    "change", [None, write("README.md", "the second")], ids=["weights", "description"]
)
def test_the_same_tokenizer_is_not_loaded_again(
    tmp_path: Path, change: Callable[[Path], object] | None
) -> None:
    last = LastTokenizer()
    first = last.load(*published(tmp_path, 1))
    assert last.load(*published(tmp_path, 2, change)) is first


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (add_a_token, lambda tokenizer: len(tokenizer.encode("hello")) == 1),
        (
            write("config.json", json.dumps(CONFIG | {"max_position_embeddings": 32})),
            lambda tokenizer: tokenizer.context_length == 32,
        ),
        (
            write("generation_config.json", '{"eos_token_id": 7}'),
            lambda tokenizer: tokenizer.eos_token_ids == (7,),
        ),
        (
            write("chat_template.jinja", "{{ messages }}"),
            lambda tokenizer: tokenizer.chat_template is not None,
        ),
    ],
    ids=["tokens", "context", "end", "chat template"],
)
def test_another_one_is(
    tmp_path: Path, change: Callable[[Path], object], what: Callable[[object], bool]
) -> None:
    last = LastTokenizer()
    assert not what(last.load(*published(tmp_path, 1)))
    assert what(last.load(*published(tmp_path, 2, change)))


def test_one_that_cannot_be_loaded_changes_nothing(tmp_path: Path) -> None:
    last = LastTokenizer()
    first = last.load(*published(tmp_path, 1))
    with pytest.raises(ReleaseError, match=r"tokenizer\.json: cannot be read"):
        last.load(*published(tmp_path, 2, write("tokenizer.json", "{}")))
    assert last.load(*published(tmp_path, 3)) is first
