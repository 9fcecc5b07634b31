"""Releases of format 1, whose tensors have a sha256, are checked and served like those of today."""

import asyncio
import hashlib
import json
from pathlib import Path

import pytest

from serving.engine import StageError
from serving.errors import ReleaseError
from serving.weights.release_store import load_release
from serving.weights.shards import read_tensors, tensor_bytes
from serving.weights.verify import verify_release
from tests.torch_engine_changes import flip
from tests.torch_engine_fixtures import (
    Published,
    ask,
    build,
    engine_with,
    expected,
    greedy,
    llama_config,
    prompt,
    publish,
    tokens,
)

NORM = "model.norm.weight"


def as_format_1(published: Published) -> Published:
    """The same release with the manifest that was written before tensors had a BLAKE3."""
    path = published.folder / "release.json"
    manifest = json.loads(path.read_text())
    weight_map = {name: entry["file"] for name, entry in manifest["tensors"].items()}
    for name, tensor in read_tensors(published.folder, weight_map).items():
        entry = manifest["tensors"][name]
        assert entry.pop("digest").startswith("blake3:")
        entry["sha256"] = hashlib.sha256(tensor_bytes(tensor)).hexdigest()
    manifest["format"] = 1
    path.write_text(json.dumps(manifest))
    return Published(
        network=published.network, release=load_release(published.folder), folder=published.folder
    )


@pytest.fixture
def old(tmp_path: Path) -> Published:
    return as_format_1(publish(build(llama_config()), tmp_path / "old"))


def test_it_is_verified_by_its_own_digests(old: Published) -> None:
    assert verify_release(old.folder) == ()
    flip(old, NORM)
    (reason,) = verify_release(old.folder)
    assert f"tensor {NORM}: digest is sha256:" in reason and ", not sha256:" in reason


def test_a_swap_goes_from_it_to_a_release_of_today_and_back(old: Published, tmp_path: Path) -> None:
    new = publish(build(llama_config(), seed=7), tmp_path / "new")

    async def scenario() -> list[list[int]]:
        answers = []
        async with engine_with(old) as engine:
            for each in (new, old):
                await engine.stage(each.release, each.folder)
                await engine.commit(each.id)
                answers.append(tokens(await ask(engine, each.id, greedy(prompt(5)))))
        return answers

    assert asyncio.run(scenario()) == [expected(each.network, prompt(5)) for each in (new, old)]


def test_a_damaged_one_is_not_staged(old: Published) -> None:
    flip(old, NORM)

    async def scenario() -> None:
        async with engine_with() as engine:
            with pytest.raises(StageError, match=f"tensor {NORM}: digest is sha256:"):
                await engine.stage(old.release, old.folder)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"digest": "md5:" + "0" * 32}, "String should match pattern"),
        ({"digest": ""}, "String should match pattern"),
        ({"sha256": "short"}, "String should match pattern"),
        ({}, "Field required"),
    ],
)
def test_a_digest_that_nobody_can_check_is_refused(
    old: Published, change: dict[str, str], said: str
) -> None:
    path = old.folder / "release.json"
    manifest = json.loads(path.read_text())
    del manifest["tensors"][NORM]["sha256"]
    manifest["tensors"][NORM] |= change
    path.write_text(json.dumps(manifest))
    with pytest.raises(ReleaseError, match=rf"tensors\.{NORM}.*{said}"):
        load_release(old.folder)


def test_a_newer_format_is_refused(old: Published) -> None:
    path = old.folder / "release.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 3}))
    with pytest.raises(ReleaseError, match=r"format: Input should be 1 or 2"):
        load_release(old.folder)
