"""Swaps on the echo engine that fail: whatever goes wrong, the old release goes on."""

import asyncio
import errno
import json
import os
import shutil
import threading
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import pytest

from serving.engine import EngineError, Generation, Step
from serving.errors import ReleaseError
from serving.swap import measure_probe
from serving.weights import release_store
from serving.weights.release import Probe, ProbeText
from tests.echo_engine import EchoEngine
from tests.serving_fixtures import echo_release
from tests.swap_fixtures import BOTH, House, holds_two, house, lose_the_manifest, until

__all__ = ["holds_two", "house"]


def remove_the_manifest(folder: Path) -> None:
    (folder / "release.json").unlink()


def truncate_the_manifest(folder: Path) -> None:
    os.truncate(folder / "release.json", 100)


def break_the_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")


def other_bounds(folder: Path) -> None:
    manifest = json.loads((folder / "release.json").read_text())
    manifest["probe"]["bounds"] = {"bfloat16": 0.1}
    (folder / "release.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (break_the_tokenizer, "tokenizer.json: truncated"),
        (other_bounds, "no bound for float32"),
    ],
)
async def test_preflight_refuses_before_the_engine_sees_a_byte(
    house: House, damage: Callable[[Path], None], said: str
) -> None:
    damage(house.pipeline_dir / house.new.id)
    log = list(house.engine.log)
    result = await house.swapper.swap(house.new.id)
    assert (result.result, result.phase) == ("refused", "preflight")
    assert any(said in reason for reason in result.reasons), result.reasons
    assert house.engine.log == log
    await house.check_old_goes_on()


@pytest.mark.parametrize(
    ("code", "expected"),
    [(errno.EMFILE, "failed"), (errno.ENOSPC, "failed"), (errno.EIO, "refused")],
)
@pytest.mark.parametrize("file", ["release.json", "config.json"])
async def test_a_file_that_cannot_be_opened_now_is_no_damaged_file(
    house: House, monkeypatch: pytest.MonkeyPatch, file: str, code: int, expected: str
) -> None:
    broken = house.pipeline_dir / house.new.id / file
    open_file = Path.open

    def open_or_fail(path: Path, *args: Any, **options: Any) -> Any:
        if path == broken:
            raise OSError(code, os.strerror(code), str(path))
        return open_file(path, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", open_or_fail)
        result = await house.swapper.swap(house.new.id)
    assert (result.result, result.phase) == (expected, "preflight")
    assert str(broken) in result.reasons[0] and os.strerror(code) in result.reasons[0]
    assert ("releases verify" in result.reasons[-1]) == (
        code == errno.EIO and file == "release.json"
    )
    await house.check_old_goes_on()


@pytest.mark.parametrize("damage", [remove_the_manifest, truncate_the_manifest, lose_the_manifest])
async def test_without_a_whole_manifest_nothing_in_the_releases_folder_is_served(
    house: House, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    """Elsewhere, a checkpoint folder without a manifest is served as it is."""
    folder = house.pipeline_dir / house.new.id
    damage(folder)
    result = await house.swapper.swap(house.new.id)
    assert (result.result, result.phase) == ("refused", "preflight")
    assert str(folder) in result.reasons[0] and "release.json" in result.reasons[0]
    assert "pipeline releases verify" in result.reasons[-1]
    for place in (folder, shutil.copytree(folder, house.pipeline_dir / "checkpoint")):
        with pytest.raises(ReleaseError, match=r"release\.json"):
            await house.swapper.start(place)
    await house.check_old_goes_on()
    if not (folder / "release.json").exists():
        outside = folder.rename(tmp_path / "outside")
        await house.swapper.start(outside)
        assert house.admission.live is not None and house.admission.live.folder == outside


@pytest.mark.parametrize(
    "requested", ["../outside", "/etc", "", ".", "..", "r000099-00000000", "current", "current/.."]
)
async def test_only_releases_under_the_root_can_be_asked_for(house: House, requested: str) -> None:
    outside = house.pipeline_dir.parent / "outside"
    os.rename(house.pipeline_dir / house.new.id, outside)
    result = await house.swapper.swap(requested)
    assert result.result == "refused" and "no release in" in result.reasons[0]
    assert await house.answers() == house.old.id


@BOTH
@pytest.mark.parametrize("how", ["stale head", "wrong probe"])
async def test_a_probe_that_does_not_match_is_refused(house: House, how: str) -> None:
    release = house.new
    if how == "stale head":
        house.engine.keeps_old_head = True
    else:
        release = echo_release(house.pipeline_dir, 3, probe_shift=0.01)
    result = await house.swapper.swap(release.id)
    assert (result.result, result.phase) == ("refused", "probe")
    assert "probe text 1, token" in result.reasons[0]
    house.engine.keeps_old_head = False
    await house.check_old_goes_on()


async def test_after_a_text_that_failed_the_engine_computes_no_other() -> None:
    ended: list[tuple[int, ...]] = []

    class Broken(EchoEngine):
        async def generate(self, _: str, generation: Generation) -> AsyncGenerator[Step, None]:
            if len(generation.prompt) == 1:
                raise EngineError("out of order")
            try:
                await asyncio.Event().wait()
                yield Step()
            finally:
                ended.append(generation.prompt)

    texts = [ProbeText(token_ids=ids, logprobs=()) for ids in ((1, 2), (1,), (1, 3))]
    probe = Probe(dtype="float32", texts=tuple(texts), bounds={})
    with pytest.raises(EngineError, match="out of order"):
        await measure_probe(Broken(), "r000001-00000000", probe, 1.0)
    assert ended == [(1, 2), (1, 3)]


@BOTH
async def test_a_probe_that_is_longer_than_the_engine_s_context_is_refused(house: House) -> None:
    house.engine.context = 6
    result = await house.swapper.swap(house.new.id)
    assert (result.result, result.phase) == ("refused", "stage")
    assert "longer than the 6 tokens that fit here" in result.reasons[0]
    house.engine.context = None
    await house.check_old_goes_on()


@BOTH
@pytest.mark.parametrize("phase", ["stage", "commit", "generate"])
@pytest.mark.parametrize("how", ["fail", "hang"])
async def test_an_engine_in_trouble_fails_the_swap_and_the_barrier_opens(
    house: House, phase: str, how: str
) -> None:
    if how == "fail":
        house.engine.fail[phase] = EngineError("out of order")  # type: ignore[index]
    else:
        house.engine.hang[phase] = asyncio.Event()  # type: ignore[index]
    result = await asyncio.wait_for(house.swapper.swap(house.new.id), 5)
    assert result.result == "failed"
    assert result.phase == ("probe" if phase == "generate" else phase)
    assert ("out of order" if how == "fail" else "more than") in result.reasons[0]
    await house.check_old_goes_on()


async def test_a_release_that_cannot_be_read_to_its_end_fails_the_swap(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk_is_back = threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(release_store, "load_release", lambda folder: disk_is_back.wait(10))
        result = await house.swapper.swap(house.new.id)
    assert (result.result, result.phase) == ("failed", "preflight")
    assert result.reasons == ("preflight took more than 1 s",)
    disk_is_back.set()
    await house.check_old_goes_on()


@BOTH
async def test_a_disk_that_hangs_keeps_no_barrier_shut(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk_is_back = threading.Event()
    write = release_store.write_atomically
    written: list[str] = []

    def hang(path: Path, text: str) -> None:
        assert disk_is_back.wait(10)
        write(path, text)
        written.append(text)

    with monkeypatch.context() as patch:
        patch.setattr(release_store, "write_atomically", hang)
        try:
            async with asyncio.timeout(3):
                result = await house.swapper.swap(house.new.id)
                assert result.result == "failed" and "not written within" in result.reasons[0]
                assert await house.answers() == house.old.id
        finally:
            disk_is_back.set()
        # Both writes come late, and the last one is what is served.
        await until(lambda: len(written) == 2)
    assert house.new.id in written[0] and house.new.id not in written[1]
    await house.check_old_goes_on()
