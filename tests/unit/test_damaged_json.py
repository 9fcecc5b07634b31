"""JSON that Python's parser cannot read is a fault of the release, and not an unexpected error."""

from pathlib import Path

import pytest

from serving.errors import ReleaseError
from serving.weights.release import read_header, read_json

DEEP = "[" * 100_000


def test_a_header(tmp_path: Path) -> None:
    shard, header = tmp_path / "model.safetensors", '{"a": ' + DEEP
    shard.write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(4))
    with pytest.raises(ReleaseError, match="not a safetensors file"):
        read_header(shard)


def test_a_config(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(DEEP)
    with pytest.raises(ReleaseError, match=r"config\.json: not valid JSON"):
        read_json(config)
