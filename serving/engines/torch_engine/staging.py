"""Loads a release: reads its folder and makes a runner. The work is done on a thread with low
priority."""

import logging
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from serving.engine import StageError
from serving.engines.machine import free_bytes, lower_thread_priority
from serving.engines.settings import TorchEngineSettings
from serving.engines.torch_engine import llama
from serving.engines.torch_engine.architecture import (
    LlamaShape,
    llama_shape,
    llama_units,
    read_config,
    stored_units,
)
from serving.engines.torch_engine.loading import Loader, Unit
from serving.engines.torch_engine.runner import Runner
from serving.engines.torch_engine.slots import (
    KeyValueSlots,
    KvCacheSize,
    LayerShape,
    block_tokens,
    page_table_bytes,
)
from serving.errors import ReleaseError
from serving.weights import network
from serving.weights.release import read_json

_log = logging.getLogger(__name__)

_SLOTS_PER_SEQUENCE = 2
"""One slot for each running sequence, and one for a finished sequence in the prefix cache."""


def load_runner(loader: Loader, settings: TorchEngineSettings, promised_bytes: int) -> Runner:
    """Load a release and make its runner. Blocks, and lowers the priority of the calling thread.

    The manifest and the free memory are checked before any tensor is read, and the KV cache gets
    its address range. `promised_bytes` is free memory that other releases may still take. Raises
    ReleaseError, StageError and StagingCancelled.
    """
    lower_thread_priority()
    started = time.perf_counter()
    shape = llama_shape(read_config(loader.folder))
    with torch.inference_mode():
        runner = (
            _load_generic(loader, settings, promised_bytes)
            if shape is None
            else _load_llama(shape, loader, settings, promised_bytes)
        )
    _log.info(
        "staged %s in %.2f s: read %d bytes",
        loader.release.id,
        time.perf_counter() - started,
        loader.read_bytes,
    )
    return runner


def check_servable(folder: Path) -> None:
    """Raises ReleaseError if the torch engine cannot serve the network of a checkpoint folder:
    because the network keeps a state for each sequence, because it is unknown, or because its
    weights are quantised. No tensor is read.

    Does nothing if `config.json` names no architecture, because then the network is not known.
    """
    if not read_json(folder / network.CONFIG_FILE).get("architectures"):
        return
    try:
        if llama_shape(read_config(folder)) is None:
            from serving.engines.torch_engine import generic

            generic.layer_shapes(folder)
    except StageError as error:
        raise ReleaseError(*error.reasons) from error


def _load_llama(
    shape: LlamaShape, loader: Loader, settings: TorchEngineSettings, promised_bytes: int
) -> Runner:
    units = llama_units(shape)
    loader.check(units)
    layer = LayerShape(
        num_heads=shape.num_kv_heads, key_size=shape.head_dim, value_size=shape.head_dim
    )
    layers = [layer] * shape.num_layers
    cache_size = _plan_memory(loader, settings, units, shape.context, layers, promised_bytes)
    slots = _slots(loader, cache_size, layers)
    return llama.LlamaRunner(shape, loader.load(units), slots, cache_size)


def _load_generic(loader: Loader, settings: TorchEngineSettings, promised_bytes: int) -> Runner:
    from serving.engines.torch_engine import generic

    units = stored_units(loader.release)
    layers = generic.layer_shapes(loader.folder)
    built: Any = network.build_network(loader.folder, loader.dtype)
    context = generic.allowed_context(built.config)
    cache_size = _plan_memory(loader, settings, units, context, layers, promised_bytes)
    slots = _slots(loader, cache_size, layers)
    tensors: dict[str, Any] = loader.load(units)
    tied = {alias: tensors[name] for alias, name in loader.release.tied.items()}
    network.load_weights(built, tensors | tied)
    runner = generic.TransformersRunner(built, slots, cache_size)
    # The parameters use the memory of the stored tensors, and the pool holds these weakly.
    used = {each.data_ptr() for each in built.state_dict().values()}
    runner.stored = [each for each in tensors.values() if each.data_ptr() in used]
    return runner


def _slots(
    loader: Loader, cache_size: KvCacheSize, layers: Sequence[LayerShape]
) -> list[KeyValueSlots]:
    """The slots of each layer. They are made before the weights are loaded, so that a refusal of
    the system comes early."""
    try:
        return [
            KeyValueSlots(
                layer,
                num_slots=cache_size.num_slots,
                num_tokens=cache_size.slot_tokens,
                dtype=loader.dtype,
            )
            for layer in layers
        ]
    except OSError as error:
        raise StageError(
            f"{cache_size.num_slots} slots of {cache_size.context} tokens: the system does not "
            f"provide their address range ({error}); lower max_batch or max_context under "
            "[serving.torch], or raise the limit of virtual memory (ulimit -v)"
        ) from error


def _plan_memory(
    loader: Loader,
    settings: TorchEngineSettings,
    units: Mapping[str, Unit],
    allowed: int,
    layers: Sequence[LayerShape],
    promised_bytes: int,
) -> KvCacheSize:
    """The size of the KV cache of a network that allows a context of `allowed` tokens. Raises
    StageError if there is too little memory for this cache and the weights, or if not even one
    sequence fits into the cache."""
    tokens_of_block = math.lcm(*(block_tokens(each.head_dim, loader.dtype) for each in layers))
    block_bytes = tokens_of_block * sum(each.token_bytes(loader.dtype) for each in layers)
    num_blocks = settings.kv_cache_bytes // block_bytes
    context = min(allowed, settings.max_context or allowed)
    fitting = num_blocks * tokens_of_block
    if fitting < context and settings.max_context is None and fitting:
        # If a release allows a long context, serve it with a shorter one instead of refusing it.
        _log.warning(
            "kv_cache_bytes (%d) is too small for a sequence of %d tokens, which the release "
            "allows: max_context is lowered to %d",
            *(settings.kv_cache_bytes, context, fitting),
        )
        context = fitting
    slot_blocks = -(-context // tokens_of_block)
    if num_blocks < slot_blocks:
        raise StageError(
            f"one sequence of {context} tokens needs {slot_blocks * block_bytes} bytes of keys and "
            f"values, but kv_cache_bytes is {settings.kv_cache_bytes}; raise kv_cache_bytes or "
            "lower max_context, under [serving.torch]"
        )
    num_slots = _SLOTS_PER_SEQUENCE * settings.max_batch
    cache_size = KvCacheSize(
        num_slots=num_slots,
        num_blocks=min(num_blocks, num_slots * slot_blocks),
        block_tokens=tokens_of_block,
        block_bytes=block_bytes,
        context=context,
    )
    weight_bytes = loader.missing_bytes(units)
    kv_bytes = cache_size.num_blocks * block_bytes + sum(
        page_table_bytes(
            layer.num_heads,
            num_slots,
            cache_size.slot_tokens * layer.head_dim * loader.dtype.itemsize,
        )
        for layer in layers
    )
    free = free_bytes()
    needed = weight_bytes + kv_bytes + settings.memory_reserve_bytes
    if free is not None and needed > free - promised_bytes:
        raise StageError(
            f"too little memory: {loader.release.id} needs {weight_bytes} bytes "
            f"for weights and {kv_bytes} for keys and values, with "
            f"{settings.memory_reserve_bytes} to spare; {free} are free, of which other releases "
            f"may still take {promised_bytes}. "
            "Lower max_batch, max_context or kv_cache_bytes under [serving.torch]"
        )
    return cache_size
