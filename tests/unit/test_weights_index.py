"""The weights index: both forms are read, and nothing in it leads out of its folder."""

import json
from pathlib import Path

import pytest

from serving.errors import ReleaseError
from serving.weights.release import BIN_INDEX_FILE, INDEX_FILE, has_bin, read_index

SPECIFIED = {
    "metadata": {"total_size": 13476839424},
    "weight_map": {
        "model.embed_tokens.weight": "pytorch_model-00001-of-00002.bin",
        "model.layers.0.self_attn.q_proj.weight": "pytorch_model-00001-of-00002.bin",
        "model.layers.0.mlp.up_proj.weight": "pytorch_model-00002-of-00002.bin",
        "model.norm.weight": "pytorch_model-00002-of-00002.bin",
        "lm_head.weight": "pytorch_model-00002-of-00002.bin",
    },
}


def test_the_bin_form_of_the_specification_is_read(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(SPECIFIED))
    assert read_index(tmp_path) is None
    index = read_index(tmp_path, BIN_INDEX_FILE)
    assert index is not None
    assert has_bin(index.weight_map.values())
    assert index.metadata["total_size"] == 13476839424
    assert set(index.weight_map.values()) == {
        "pytorch_model-00001-of-00002.bin",
        "pytorch_model-00002-of-00002.bin",
    }
    assert index.weight_map == SPECIFIED["weight_map"]
    (tmp_path / INDEX_FILE).write_text(index.model_dump_json())
    assert read_index(tmp_path) == index


@pytest.mark.parametrize(
    "shard",
    [
        "../model.safetensors",
        "/etc/model.safetensors",
        "sub/model.safetensors",
        ".hidden.safetensors",
        "model.pkl",
        "",
    ],
)
def test_a_shard_is_a_plain_file_of_the_folder(shard: str, tmp_path: Path) -> None:
    content = {"metadata": {"total_size": 4}, "weight_map": {"a": shard}}
    (tmp_path / INDEX_FILE).write_text(json.dumps(content))
    with pytest.raises(ReleaseError, match="weight_map"):
        read_index(tmp_path)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "EOF while parsing"),
        ("[]", "valid dictionary|object"),
        ('{"metadata": {}}', "weight_map"),
        ('{"metadata": {"total_size": 1}, "weight_map": {}}', "weight_map"),
    ],
)
def test_an_index_that_does_not_hold_is_an_error_that_says_why(
    text: str, reason: str, tmp_path: Path
) -> None:
    (tmp_path / INDEX_FILE).write_text(text)
    with pytest.raises(ReleaseError, match=reason) as caught:
        read_index(tmp_path)
    assert all(each.startswith(f"{INDEX_FILE}: ") for each in caught.value.reasons)
