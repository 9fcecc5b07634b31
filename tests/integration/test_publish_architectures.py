"""What no engine could serve is refused when it is published, with the reason."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from serving.errors import ReleaseError
from serving.weights.publish import publish_folder
from tests.hub_checkpoints import store


def edit_config(**changes: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return edit


def edit_tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return edit


EXPERT = "model.layers.1.block_sparse_moe.experts.2.w3.weight"


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (edit_tensors(lambda tensors: tensors.pop(EXPERT)), "tensor model.layers.1.mlp.experts."),
        (edit_config(num_local_experts=8), "config.json asks for [8, 192, 64]"),
        (edit_config(model_type="invented"), "config.json: transformers cannot read it"),
        (edit_config(architectures=["MixtralForMaskedLM"]), "generates no text"),
    ],
    ids=["missing", "shape", "unknown", "no text"],
)
def test_what_cannot_be_served_is_not_published(
    harm: Callable[[Path], None], reason: str, tmp_path: Path
) -> None:
    store("mixtral", tmp_path / "checkpoint")
    harm(tmp_path / "checkpoint")
    with pytest.raises(ReleaseError) as raised:
        publish_folder(tmp_path / "answers", tmp_path / "checkpoint")
    assert any(reason in each for each in raised.value.reasons), raised.value.reasons
    assert not [path for path in (tmp_path / "answers").iterdir() if path.is_dir()]


def test_a_config_that_names_no_architecture_is_not_judged(tmp_path: Path) -> None:
    store("mixtral", tmp_path / "checkpoint")
    edit_config(architectures=None, model_type="invented")(tmp_path / "checkpoint")
    assert publish_folder(tmp_path / "answers", tmp_path / "checkpoint").tensors
