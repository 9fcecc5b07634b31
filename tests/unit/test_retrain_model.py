"""A base model on disk that cannot be loaded as it is."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from pipeline.retrain.base_model import train_tokenizer
from pipeline.retrain.errors import BaseModelError
from pipeline.retrain.model import load_model
from tests.training_fixtures import make_model
from tests.unit.test_retrain_plan import settings


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
