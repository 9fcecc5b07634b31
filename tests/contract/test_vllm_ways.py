"""Which models' weights are copied, and which are left to vLLM's own reload. Nothing starts."""

import os
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("vllm", reason="make test-vllm has it", exc_type=ModuleNotFoundError)

from vllm.model_executor.layers.linear import UnquantizedLinearMethod

from serving.engines import vllm_shadow, vllm_worker
from serving.engines.vllm_shadow import CannotCopy, check_memory, check_plain
from serving.engines.vllm_worker import HotpushWorker, _Staging

pytestmark = pytest.mark.vllm


class PackingMethod(UnquantizedLinearMethod):
    """As those of mixtures of experts and of quantised weights, it is another class."""


def layer(method: object) -> nn.Module:
    module = nn.Linear(2, 2)
    module.quant_method = method  # type: ignore[assignment]
    return module


def worker(model: nn.Module, **special: Any) -> Any:
    settings: dict[str, Any] = {
        "quantization": None,
        "use_mla": False,
        "is_hybrid": False,
        "lora_config": None,
        "speculative_config": None,
        "cache_dtype": "auto",
        **special,
    }
    return SimpleNamespace(
        vllm_config=SimpleNamespace(
            model_config=SimpleNamespace(
                quantization=settings["quantization"],
                use_mla=settings["use_mla"],
                is_hybrid=settings["is_hybrid"],
            ),
            cache_config=SimpleNamespace(cache_dtype=settings["cache_dtype"]),
            lora_config=settings["lora_config"],
            speculative_config=settings["speculative_config"],
        ),
        model_runner=SimpleNamespace(get_model=lambda: model),
    )


def test_a_model_whose_weights_vllm_leaves_alone_is_copied() -> None:
    check_plain(worker(nn.Sequential(layer(UnquantizedLinearMethod()))))


@pytest.mark.parametrize(
    ("special", "said"),
    [
        ({"quantization": "fp8"}, "quantised"),
        ({"use_mla": True}, "latent attention"),
        ({"is_hybrid": True}, "state-space"),
        ({"lora_config": object()}, "adapters"),
        ({"speculative_config": object()}, "speculative"),
        ({"cache_dtype": "fp8_e4m3"}, "keys and values are quantised"),
    ],
)
def test_a_special_model_is_left_to_vllm_and_the_reason_is_told(
    special: dict[str, Any], said: str
) -> None:
    with pytest.raises(CannotCopy, match=said):
        check_plain(worker(nn.Sequential(layer(UnquantizedLinearMethod())), **special))


def test_a_layer_that_transforms_its_weights_is_named() -> None:
    with pytest.raises(CannotCopy, match="1: PackingMethod transforms its weights"):
        check_plain(worker(nn.Sequential(layer(UnquantizedLinearMethod()), layer(PackingMethod()))))


def test_a_class_that_transforms_its_weights_is_left_to_vllm() -> None:
    class Transforming(nn.Module):
        def process_weights_after_loading(self) -> None: ...

    with pytest.raises(CannotCopy, match="its class transforms"):
        check_plain(worker(Transforming()))


class Worker(HotpushWorker):
    """As vLLM makes one, without a model."""


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (CannotCopy("its class transforms weights"), "its class transforms weights"),
        (RuntimeError("no such kernel"), "RuntimeError: no such kernel"),
        (KeyError("lm_head.weight"), "KeyError: 'lm_head.weight'"),
    ],
)
def test_whatever_keeps_weights_from_being_copied_leaves_vllms_own_way(
    monkeypatch: pytest.MonkeyPatch, error: Exception, said: str
) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(vllm_worker, "CopiedWeights", fail)
    monkeypatch.setattr(vllm_worker, "_end_with_server", lambda server_pid: None)
    told = Worker().hotpush_prepare("r000001-00000000", "folder", {}, "copy", os.getpid())
    assert (told["way"], told["reason"]) == ("reload", said)


@pytest.mark.parametrize("num_copies", [1, 2])
def test_a_second_copy_that_finds_no_room_is_not_made(
    monkeypatch: pytest.MonkeyPatch, num_copies: int
) -> None:
    shadow = nn.Linear(10, 10, bias=False, dtype=torch.bfloat16)
    monkeypatch.setattr(vllm_shadow, "free_bytes", lambda device: num_copies * 200)
    check_memory(shadow, num_copies=num_copies)
    with pytest.raises(CannotCopy, match=rf"needs {(num_copies + 1) * 200} bytes"):
        check_memory(shadow, num_copies=num_copies + 1)


@pytest.mark.parametrize("ends", ["before", "meanwhile", "after"])
def test_weights_that_nobody_wants_are_freed_whenever_their_staging_ends(ends: str) -> None:
    may_end, freed = threading.Event(), []

    class Staging(_Staging):
        def __setattr__(self, name: str, value: Any) -> None:
            if ends == "meanwhile" and "is_unwanted" in name and value and not may_end.is_set():
                may_end.set()
                # Without a lock, the thread ends now and does not see that it is unwanted.
                self.join(0.5)
            super().__setattr__(name, value)

    def stage() -> int:
        may_end.wait()
        return 0

    worker = Worker()
    worker.hotpush_weights = SimpleNamespace(forget=freed.append)  # type: ignore[assignment]
    job = Staging(stage, lambda: freed.append("r000002-00000000"))
    worker.hotpush_jobs = {"r000002-00000000": job}
    job.start()
    if ends == "before":
        may_end.set()
        job.join()
    worker.hotpush_forget("r000002-00000000")
    may_end.set()
    job.join()
    assert freed == ["r000002-00000000"]
