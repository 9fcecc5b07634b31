"""A swap loads a tokenizer where there is another one, and not where it is the live one."""

import json
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import torch
from tokenizers import Tokenizer

import serving.swap
from serving.tokenizer import load_tokenizer
from serving.weights.publish import publish_state_dict
from serving.weights.release import QUESTIONS_FILE, Release
from serving.weights.release_store import set_current
from tests.contract.engine_bench import swap
from tests.serving_fixtures import byte_tokenizer, echo_app, echo_release, running


def with_hello() -> Tokenizer:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens(["hello"])
    return tokenizer


def test_it_is_loaded_when_it_is_not_the_live_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[str] = []

    def load(folder: Path) -> object:
        loaded.append(folder.name)
        return load_tokenizer(folder)

    monkeypatch.setattr(serving.swap, "load_tokenizer", load)
    first, same, wrong = (
        echo_release(tmp_path, 1),
        echo_release(tmp_path, 2),
        echo_release(tmp_path, 3, chat_template="{{ messages }}", probe_shift=1.0),
    )
    other = echo_release(tmp_path, 4, chat_template="{{ messages }}")
    set_current(tmp_path, first.id)
    with running(echo_app(tmp_path)) as url, httpx.Client(base_url=url) as http:
        for release, result in ((same, "live"), (wrong, "refused"), (first, "live")):
            assert swap(http, release.id).json()["result"] == result
        assert loaded == [first.id, wrong.id], "what was refused is not what was live"
        asked = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
        assert http.post("/v1/chat/completions", json=asked).status_code == 400
        assert swap(http, other.id).json()["result"] == "live"
        assert loaded == [first.id, wrong.id, other.id]
        assert http.post("/v1/chat/completions", json=asked).status_code == 200


def published(home: Path, seed: int, change: Callable[[Path], object]) -> Release:
    files = home / f"files-{seed}"
    files.mkdir()
    (files / "config.json").write_text(json.dumps({"vocab_size": 258}))
    byte_tokenizer().save(str(files / "tokenizer.json"))
    change(files)
    weights = {"a": torch.rand(4, 4, generator=torch.Generator().manual_seed(seed))}
    return publish_state_dict(home / "releases", weights, files_dir=files)


def write(name: str, text: str) -> Callable[[Path], object]:
    return lambda files: (files / name).write_text(text)


@pytest.mark.parametrize(
    ("change", "are_same"),
    [
        (lambda files: None, True),
        (write("README.md", "the second"), True),
        (write(QUESTIONS_FILE, "[]"), True),
        (lambda files: with_hello().save(str(files / "tokenizer.json")), False),
        (write("config.json", '{"vocab_size": 259}'), False),
        (write("generation_config.json", '{"eos_token_id": 7}'), False),
        (write("chat_template.jinja", "{{ messages }}"), False),
    ],
    ids=["weights", "description", "questions", "tokens", "config", "end", "chat template"],
)
def test_which_files_make_it_another_one(
    tmp_path: Path, change: Callable[[Path], object], are_same: bool
) -> None:
    first = published(tmp_path, 1, write("README.md", "the first"))
    second = published(tmp_path, 2, change)
    assert (first.tokenizer_files == second.tokenizer_files) == are_same
