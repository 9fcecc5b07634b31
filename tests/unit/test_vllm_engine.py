"""What `VllmEngine` refuses before vLLM sees it. vLLM is a stub here."""

import asyncio
from pathlib import Path

import pytest
import torch

from serving.engine import EngineError, StageError
from serving.engines.vllm_engine import VllmEngine
from serving.engines.vllm_settings import VllmEngineSettings
from serving.weights.publish import publish_state_dict
from serving.weights.release import Release
from tests.serving_fixtures import save_config, tiny_llama
from tests.vllm_stub import StubbedVllm

NAME = "model.norm.weight"


def release_with(pipeline_dir: Path, dtype: torch.dtype) -> Release:
    """Of a network of floats, but for one tensor."""
    network = tiny_llama(tied=False)
    tensors = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    tensors[NAME] = tensors[NAME].to(dtype)
    files_dir = save_config(network, pipeline_dir.parent / "files")
    return publish_state_dict(pipeline_dir, tensors, files_dir=files_dir)


def staged_after(pipeline_dir: Path, before: torch.dtype, after: torch.dtype) -> tuple[str, ...]:
    """The reasons against the second release."""

    async def story() -> tuple[str, ...]:
        engine = VllmEngine(VllmEngineSettings(), StubbedVllm().start)
        first, second = (release_with(pipeline_dir, dtype) for dtype in (before, after))
        try:
            await engine.stage(first, pipeline_dir / first.id)
            await engine.commit(first.id)
            await engine.stage(second, pipeline_dir / second.id)
        except StageError as error:
            return error.reasons
        finally:
            await engine.close()
        return ()

    return asyncio.run(story())


@pytest.mark.parametrize(
    ("before", "after", "kinds"),
    [
        (torch.float32, torch.int64, ("I64", "F32")),
        (torch.bfloat16, torch.bool, ("BOOL", "BF16")),
        (torch.int64, torch.float32, ("F32", "I64")),
    ],
)
def test_numbers_of_another_kind_are_refused_with_file_and_tensor(
    tmp_path: Path, before: torch.dtype, after: torch.dtype, kinds: tuple[str, str]
) -> None:
    reason, advice = staged_after(tmp_path / "releases", before, after)
    found, expected = (f"{kind} [16]" for kind in kinds)
    assert reason.endswith(f".safetensors: tensor {NAME}: {found} in place of {expected}")
    assert "start the server again" in advice


def test_floats_of_another_width_are_the_same_network(tmp_path: Path) -> None:
    assert staged_after(tmp_path / "releases", torch.float32, torch.bfloat16) == ()


def test_vllm_keeps_the_dtype_of_the_first_release_that_it_starts_on(tmp_path: Path) -> None:
    pipeline_dir = tmp_path / "releases"
    network = tiny_llama(tied=False)
    files_dir = save_config(network, tmp_path / "files")
    small, exact = (
        publish_state_dict(
            pipeline_dir,
            {name: tensor.to(dtype) for name, tensor in network.state_dict().items()},
            files_dir=files_dir,
        )
        for dtype in (torch.bfloat16, torch.float32)
    )

    async def story() -> None:
        stub = StubbedVllm()
        stub.fails_starts = 1
        engine = VllmEngine(VllmEngineSettings(), stub.start)
        try:
            with pytest.raises(StageError):
                await engine.stage(small, pipeline_dir / small.id)
            assert engine.dtype_of(exact) == "float32", "vLLM did not start on the other one"
            await engine.stage(exact, pipeline_dir / exact.id)
            assert engine.dtype_of(small) == "float32", "a swap does not change it"
        finally:
            await engine.close()

    asyncio.run(story())


def test_a_commit_fails_at_once_if_vllm_has_died_since_the_release_was_staged(
    tmp_path: Path,
) -> None:
    """Requests wait meanwhile, and a new vLLM does not hold the release."""
    pipeline_dir = tmp_path / "releases"
    first, second = (release_with(pipeline_dir, dtype) for dtype in (torch.float32, torch.bfloat16))

    async def story() -> None:
        stub = StubbedVllm()
        engine = VllmEngine(VllmEngineSettings(), stub.start)
        try:
            await engine.stage(first, pipeline_dir / first.id)
            await engine.commit(first.id)
            await engine.stage(second, pipeline_dir / second.id)
            stub.hangs_starts = 1
            assert stub.process is not None
            await stub.process.end()
            with pytest.raises(EngineError, match=f"{second.id} is not staged: vLLM died and is"):
                await engine.commit(second.id)
            await engine.commit(first.id)
        finally:
            await engine.close()

    asyncio.run(asyncio.wait_for(story(), 10))
