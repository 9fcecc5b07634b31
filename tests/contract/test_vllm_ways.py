"""Which models' weights are copied, and which are left to vLLM's own reload. Nothing starts."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

pytest.importorskip("vllm", reason="make test-vllm has it", exc_type=ModuleNotFoundError)

from vllm.model_executor.layers.linear import UnquantizedLinearMethod

from serving.engines import vllm_worker
from serving.engines.vllm_worker import CannotCopy, HotpushWorker, ReloadedWeights, check_plain
from serving.errors import ReleaseError

pytestmark = pytest.mark.vllm


class PackingMethod(UnquantizedLinearMethod):
    """As those of mixtures of experts and of quantised weights, it is another class."""


def layer(method: object) -> nn.Module:
    module = nn.Linear(2, 2)
    module.quant_method = method  # type: ignore[assignment]
    return module


def worker(model: nn.Module, **special: Any) -> Any:
    settings = {"quantization": None, "use_mla": False, "is_hybrid": False, **special}
    return SimpleNamespace(
        vllm_config=SimpleNamespace(model_config=SimpleNamespace(**settings)),
        model_runner=SimpleNamespace(get_model=lambda: model),
    )


def test_a_model_whose_weights_vllm_leaves_alone_is_copied() -> None:
    check_plain(worker(PLAIN))


class Transforming(nn.Module):
    def process_weights_after_loading(self) -> None: ...


PLAIN = nn.Sequential(layer(UnquantizedLinearMethod()))


@pytest.mark.parametrize(
    ("model", "special", "said"),
    [
        (PLAIN, {"quantization": "fp8"}, "quantised"),
        (PLAIN, {"use_mla": True}, "latent attention"),
        (PLAIN, {"is_hybrid": True}, "state-space"),
        (Transforming(), {}, "its class transforms"),
        (
            nn.Sequential(*PLAIN, layer(PackingMethod())),
            {},
            "1: PackingMethod transforms its weights",
        ),
    ],
)
def test_a_special_model_is_left_to_vllm_and_the_reason_is_told(
    model: nn.Module, special: dict[str, Any], said: str
) -> None:
    with pytest.raises(CannotCopy, match=said):
        check_plain(worker(model, **special))


class Worker(HotpushWorker):
    """As vLLM makes one, without a model."""


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (CannotCopy("its class transforms weights"), "CannotCopy: its class transforms weights"),
        (RuntimeError("no such kernel"), "RuntimeError: no such kernel"),
    ],
)
def test_whatever_keeps_weights_from_being_copied_leaves_vllms_own_way(
    monkeypatch: pytest.MonkeyPatch, error: Exception, said: str
) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(vllm_worker, "CopiedWeights", fail)
    monkeypatch.setattr(vllm_worker, "_end_with_server", lambda server_pid: None)
    worker = Worker()
    told = worker.hotpush_prepare("r000001-00000000", "folder", {}, "copy", os.getpid())
    assert told["reason"] == said
    assert isinstance(worker.hotpush_weights, ReloadedWeights)


@pytest.mark.parametrize("free", [999, 1000, None])
def test_a_second_copy_that_finds_no_room_is_not_made(
    monkeypatch: pytest.MonkeyPatch, free: int | None
) -> None:
    monkeypatch.setattr(vllm_worker, "free_bytes", lambda: free)
    with (
        pytest.raises(ReleaseError, match="1000 bytes are needed, 999 are free")
        if (free == 999)
        else nullcontext()
    ):
        vllm_worker._check_memory(1000)


@pytest.mark.parametrize("ends", ["before", "after"])
def test_weights_that_nobody_wants_are_freed_whenever_their_staging_ends(ends: str) -> None:
    may_end, freed = threading.Event(), []

    def stage(*_: Any) -> int:
        may_end.wait()
        return 0

    worker = Worker()
    worker.hotpush_thread = ThreadPoolExecutor(1)
    worker.hotpush_weights = SimpleNamespace(  # type: ignore[assignment]
        stage=stage, forget=freed.append
    )
    worker.hotpush_stage("r000002-00000000", "folder", {})
    assert worker.hotpush_status() is None
    if ends == "before":
        may_end.set()
        worker.hotpush_staging.result()
    worker.hotpush_forget("r000002-00000000")
    may_end.set()
    worker.hotpush_thread.shutdown()
    assert freed == ["r000002-00000000"]
