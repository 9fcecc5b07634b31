"""The weights index: nothing in it leads out of its folder."""

import json
from pathlib import Path

import pytest

from serving.errors import ReleaseError
from serving.weights.release import INDEX_FILE, read_index


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
