"""The shadow of a vLLM worker's model: the same classes and loaders once more, in host memory.

It is registered nowhere and never run. It tells where a checkpoint's tensors go among the fused
parameters, and packs them as vLLM packs.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from vllm.config import CompilationMode
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype

from serving.engines.torch_engine.device import free_bytes

# Whatever else vLLM does to weights after it loaded them is left to vLLM.
_PLAIN_METHODS = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)


class CannotCopy(Exception):
    """Weights of this model cannot be exchanged by copying; the message says why."""


def check_plain(worker: Any) -> None:
    """Raises CannotCopy for a model whose weights vLLM transforms after loading."""
    config = worker.vllm_config
    model = worker.model_runner.get_model()
    is_special = {
        "it is quantised": config.model_config.quantization is not None,
        "it has latent attention (MLA)": config.model_config.use_mla,
        "it has state-space layers": config.model_config.is_hybrid,
        "adapters are on": config.lora_config is not None,
        "speculative decoding is on": config.speculative_config is not None,
        "keys and values are quantised": config.cache_config.cache_dtype.startswith("fp8"),
        "its class transforms weights after loading": hasattr(
            model, "process_weights_after_loading"
        ),
    }
    if reasons := [reason for reason, holds in is_special.items() if holds]:
        raise CannotCopy("; ".join(reasons))
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if method is not None and type(method) not in _PLAIN_METHODS:
            raise CannotCopy(f"{name}: {type(method).__name__} transforms its weights")


def build_shadow(vllm_config: Any) -> nn.Module:
    """The same model once more, in host memory, registered nowhere and never run."""
    config = copy.copy(vllm_config)
    config.compilation_config = copy.copy(vllm_config.compilation_config)
    config.compilation_config.mode = CompilationMode.NONE
    # Layers enter themselves here by name, and a name must not come twice.
    config.compilation_config.static_forward_context = {}
    with set_default_torch_dtype(config.model_config.dtype), torch.device("cpu"):
        shadow: nn.Module = initialize_model(config)
    return shadow


def check_memory(shadow: nn.Module, *, num_copies: int) -> None:
    """Before it is filled: raises CannotCopy where the host has no room for it."""
    needed = num_copies * sum(param.nbytes for param in shadow.parameters())
    free = free_bytes(torch.device("cpu"))
    if free is not None and needed > free:
        raise CannotCopy(f"too little memory: a second copy needs {needed} bytes, {free} are free")


def load_and_trace(
    shadow: nn.Module, tensors: Mapping[str, torch.Tensor]
) -> dict[str, tuple[str, ...]]:
    """Load all of a checkpoint, one tensor after the other; which parameters each one goes to.

    Raises CannotCopy where that cannot be told.
    """
    names = {name for name, _ in shadow.named_parameters()}
    targets = {}
    for name, tensor in tensors.items():
        loaded = shadow.load_weights([(name, tensor)])  # type: ignore[operator]
        if loaded is None or not set(loaded) <= names:
            raise CannotCopy(f"{name}: vLLM does not tell where it goes")
        targets[name] = tuple(loaded)
    if missed := names - {target for each in targets.values() for target in each}:
        raise CannotCopy(f"{', '.join(sorted(missed)[:3])}: not in the checkpoint")
    return targets


def check_same_ties(shadow: nn.Module, live: nn.Module) -> None:
    """vLLM ties a head to the embedding when the two happen to be equal in a checkpoint. In the
    next one they need not be: raises CannotCopy."""
    heads = {name for name, _ in shadow.named_parameters()}
    if merged := heads - {name for name, _ in live.named_parameters()}:
        raise CannotCopy(f"{', '.join(sorted(merged))}: tied by vLLM, since equal in this release")


def pack(module: nn.Module) -> Callable[..., torch.Tensor]:
    """What vLLM computes this module's product with. Leaves the module as it was."""
    weight, bias = module.weight, getattr(module, "bias", None)
    bias_data = None if bias is None else bias.data
    module.quant_method.process_weights_after_loading(module)  # type: ignore[union-attr,operator]
    packed: Callable[..., torch.Tensor] = module.cpu_linear  # type: ignore[assignment]
    module.weight = weight
    if bias is not None:
        bias.data = bias_data
    return packed
