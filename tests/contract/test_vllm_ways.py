"""Which models' weights are copied, and which are left to vLLM's own reload. Nothing starts."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

pytest.importorskip("vllm", reason="make test-vllm has it", exc_type=ModuleNotFoundError)

from vllm.model_executor.layers.linear import UnquantizedLinearMethod

from serving.engines.vllm_shadow import CannotCopy, check_plain

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
