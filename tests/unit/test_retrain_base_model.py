"""Which hub a base model comes from, with whose token, and one that cannot be loaded as it is."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from pipeline.retrain.base_model import PRESETS, find_base, needed_files, train_tokenizer
from pipeline.retrain.errors import BaseModelAway, BaseModelError
from pipeline.retrain.model import load_model
from tests.receiver_fixtures import serve
from tests.retrain_fixtures import TINY
from tests.training_fixtures import make_model
from tests.unit.test_retrain_plan import settings

__all__ = ["serve"]


class Hub:
    """Has no model at all, and remembers which tokens it was shown."""

    def __init__(self) -> None:
        self.url = ""
        self.shown: set[str | None] = set()
        self.status = 404

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.shown.add(Request(scope).headers.get("authorization"))
        await Response(status_code=self.status)(scope, receive, send)


@pytest.fixture
def hub(serve: Callable[[ASGIApp], str]) -> Hub:
    hub = Hub()
    hub.url = serve(hub)
    return hub


@pytest.mark.parametrize(
    ("own", "login", "shown"),
    [
        (None, None, None),
        (None, "hf_login", "Bearer hf_login"),
        ("hf_own", "hf_login", "Bearer hf_own"),
    ],
)
def test_the_token_of_the_stack_goes_to_no_other_hub(
    hub: Hub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    own: str | None,
    login: str | None,
    shown: str | None,
) -> None:
    monkeypatch.setenv("HF_TOKEN", "of-the-stack")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    if login is not None:
        (tmp_path / "token").write_text(f"{login}\n")
    with pytest.raises(BaseModelError, match=f"'me/it' could not be fetched from {hub.url}"):
        find_base("me/it", tmp_path, [], pipeline="p", seed=0, endpoint=hub.url, token=own)
    assert hub.shown == {shown}


@pytest.mark.parametrize(
    ("status", "is_away"), [(404, False), (403, False), (500, True), (503, True)]
)
def test_a_hub_that_is_away_is_told_from_one_that_refuses(
    hub: Hub, tmp_path: Path, status: int, is_away: bool
) -> None:
    hub.status = status
    with pytest.raises(BaseModelError) as caught:
        find_base("me/it", tmp_path, [], pipeline="p", seed=0, endpoint=hub.url)
    assert isinstance(caught.value, BaseModelAway) == is_away


def test_a_hub_that_cannot_be_reached_is_away(tmp_path: Path) -> None:
    with pytest.raises(BaseModelAway, match="could not be fetched"):
        find_base("me/it", tmp_path, [], pipeline="p", seed=0, endpoint="http://127.0.0.1:9")


@pytest.mark.parametrize(
    ("base", "problem"),
    [
        ("/no/such/folder", "no base model at /no/such/folder"),
        ("preset:huge", "no preset 'preset:huge'"),
    ],
)
def test_a_missing_base_model_is_named(tmp_path: Path, base: str, problem: str) -> None:
    with pytest.raises(BaseModelError, match=problem):
        find_base(base, tmp_path, [], pipeline="p", seed=0)


def test_half_a_preset_of_a_killed_job_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PRESETS, "preset:tiny", TINY)
    half = tmp_path / "p/.tiny.999"
    half.mkdir(parents=True)
    assert (find_base("preset:tiny", tmp_path, [], pipeline="p", seed=0).folder).is_dir()
    assert not half.exists()


def test_only_what_a_model_is_loaded_from_is_fetched() -> None:
    kept = ["config.json", "generation_config.json", "tokenizer.json", "merges.txt", "spiece.model"]
    kept += ["chat_template.jinja", "pytorch_model.bin.index.json"]
    weights = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    pickled = ["pytorch_model-00001-of-00001.bin"]
    others = ["README.md", "onnx/model.onnx", "original/consolidated.00.pth", "tf_model.h5"]
    others += ["consolidated.safetensors", "consolidated.safetensors.index.json", "q4.gguf"]
    index = "model.safetensors.index.json"
    assert set(needed_files([*kept, index, *weights, *pickled, *others])) == {
        *kept,
        index,
        *weights,
    }
    assert set(needed_files([*kept, *pickled, *others])) == {*kept, *pickled}


def rename(folder: Path) -> None:
    path = folder / "model.safetensors"
    renamed = {f"x.{name}": tensor for name, tensor in load_file(path).items()}
    save_file(renamed, path, {"format": "pt"})


def cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-500])


def widen(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_size": 32}))


def empty(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (rename, "has no weights called lm_head.weight"),
        (cut, "cannot be loaded as a causal model: Error while deserializing"),
        (widen, "cannot be loaded as a causal model"),
        (empty, "cannot be loaded as a causal model"),
    ],
)
def test_a_damaged_base_model_is_named(
    tmp_path: Path, damage: Callable[[Path], None], reason: str
) -> None:
    make_model().save_pretrained(tmp_path)
    train_tokenizer([]).save_pretrained(tmp_path)
    told = settings(base_model=str(tmp_path))
    assert load_model(tmp_path, told).max_length == 1024
    damage(tmp_path)
    with pytest.raises(BaseModelError, match=reason) as caught:
        load_model(tmp_path, told)
    assert str(tmp_path) in str(caught.value)
