"""Builds the shadow of a vLLM worker's model: a second model of the same classes, in host memory.

vLLM does not know the shadow, and the shadow never computes. It shows into which fused parameters
vLLM loads each tensor of a checkpoint, and it packs weights in the same way as vLLM.
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

# Weights with any other method are transformed after loading, so they are left to vLLM's reload.
_PLAIN_METHODS = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)


class CannotCopy(Exception):
    """The weights of this model cannot be replaced by copying. The message says why."""


def check_plain(worker: Any) -> None:
    """Raises CannotCopy if vLLM transforms the model's weights after it has loaded them."""
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
    """A second model in host memory, without weights. vLLM does not know it."""
    config = copy.copy(vllm_config)
    config.compilation_config = copy.copy(vllm_config.compilation_config)
    config.compilation_config.mode = CompilationMode.NONE
    # Each layer registers itself here under its name, and vLLM refuses a name that exists.
    config.compilation_config.static_forward_context = {}
    with set_default_torch_dtype(config.model_config.dtype), torch.device("cpu"):
        shadow: nn.Module = initialize_model(config)
    return shadow


def check_memory(shadow: nn.Module, *, num_copies: int) -> None:
    """Call it before the shadow is filled. Raises CannotCopy if there is too little host memory."""
    needed = num_copies * sum(param.nbytes for param in shadow.parameters())
    free = free_bytes(torch.device("cpu"))
    if free is not None and needed > free:
        raise CannotCopy(f"too little memory: a second copy needs {needed} bytes, {free} are free")


def load_and_trace(
    shadow: nn.Module, tensors: Mapping[str, torch.Tensor]
) -> dict[str, tuple[str, ...]]:
    """Load a checkpoint into the shadow, one tensor after the other. Returns a dict of tensor name
    → names of the parameters into which it was loaded.

    Raises CannotCopy if vLLM does not tell these parameters, or if a parameter is not loaded.
    """
    names = {name for name, _ in shadow.named_parameters()}
    targets = {}
    for name, tensor in tensors.items():
        loaded = shadow.load_weights([(name, tensor)])  # type: ignore[operator]
        if loaded is None or not set(loaded) <= names:
            raise CannotCopy(f"{name}: vLLM does not tell into which parameter it is loaded")
        targets[name] = tuple(loaded)
    if missed := names - {target for each in targets.values() for target in each}:
        raise CannotCopy(f"{', '.join(sorted(missed)[:3])}: not in the checkpoint")
    return targets


def check_same_ties(shadow: nn.Module, live: nn.Module) -> None:
    """Raises CannotCopy if vLLM has tied the head to the embedding because they are equal in this
    checkpoint. They may differ in the next one."""
    heads = {name for name, _ in shadow.named_parameters()}
    if merged := heads - {name for name, _ in live.named_parameters()}:
        names = ", ".join(sorted(merged))
        raise CannotCopy(f"{names}: vLLM has tied it to the embedding, as they are equal here")


def pack(module: nn.Module) -> Callable[..., torch.Tensor]:
    """The function with which vLLM computes the product of this module, with a packed weight. The
    module does not change."""
    weight, bias = module.weight, getattr(module, "bias", None)
    bias_data = None if bias is None else bias.data
    module.quant_method.process_weights_after_loading(module)  # type: ignore[union-attr,operator]
    packed: Callable[..., torch.Tensor] = module.cpu_linear  # type: ignore[assignment]
    module.weight = weight
    if bias is not None:
        bias.data = bias_data
    return packed
