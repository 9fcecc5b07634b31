"""Loads a release: reads its folder and makes a runner. The work is done on a thread with low
priority."""

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from serving.dtype import choose_dtype
from serving.engine import StageError
from serving.engines.machine import free_bytes
from serving.engines.torch_engine import architecture, generic, llama
from serving.engines.torch_engine.architecture import LlamaShape
from serving.engines.torch_engine.device import lower_thread_priority
from serving.engines.torch_engine.loading import Loaded, Loader, Unit, UnitPool
from serving.engines.torch_engine.runner import Runner
from serving.engines.torch_engine.settings import TorchEngineSettings
from serving.engines.torch_engine.slots import (
    KeyValueSlots,
    KvCacheSize,
    LayerShape,
    block_tokens,
    page_table_bytes,
)
from serving.errors import ReleaseError
from serving.weights import network
from serving.weights.release import Release, read_json

_log = logging.getLogger(__name__)

_SLOTS_PER_SEQUENCE = 2
"""One slot for each running sequence, and one for a finished sequence in the prefix cache."""

_MIN_SEQUENCES = 4
"""At least this many sequences must fit when `max_context` is lowered for a device on which each
slot takes memory for a whole context."""


def load_runner(
    release: Release,
    folder: Path,
    *,
    pool: UnitPool,
    settings: TorchEngineSettings,
    device: torch.device,
    promised_bytes: int,
    is_cancelled: Callable[[], bool],
    pause_share: Callable[[], float],
) -> tuple[Runner, Loaded]:
    """Load a release and make its runner. Blocks, and lowers the priority of the calling thread.

    The manifest and the free memory are checked before any tensor is read, and the KV cache gets
    its address range. `promised_bytes` is free memory that other releases may still take. Raises
    ReleaseError, StageError and StagingCancelled.
    """
    lower_thread_priority()
    started = time.perf_counter()
    config = architecture.read_config(folder)
    loader = Loader(
        release=release,
        folder=folder,
        pool=pool,
        dtype=getattr(torch, choose_dtype(settings.dtype, device.type, release)),
        device=device,
        is_cancelled=is_cancelled,
        pause_share=pause_share,
    )
    shape = architecture.llama_shape(config)
    with torch.inference_mode():
        if shape is None:
            runner, loaded = _load_generic(loader, settings, promised_bytes)
        else:
            runner, loaded = _load_llama(shape, loader, settings, promised_bytes)
    _log.info(
        "staged %s in %.2f s: read %d bytes",
        release.id,
        time.perf_counter() - started,
        loaded.read_bytes,
    )
    return runner, loaded


def check_servable(folder: Path) -> None:
    """Raises ReleaseError if the torch engine cannot serve the network of a checkpoint folder:
    because the network keeps a state for each sequence, because it is unknown, or because its
    weights are quantised. No tensor is read.

    Does nothing if `config.json` names no architecture, because then the network is not known.
    """
    if not read_json(folder / network.CONFIG_FILE).get("architectures"):
        return
    try:
        if architecture.llama_shape(architecture.read_config(folder)) is None:
            generic.layer_shapes(folder)
    except StageError as error:
        raise ReleaseError(*error.reasons) from error


def _load_llama(
    shape: LlamaShape, loader: Loader, settings: TorchEngineSettings, promised_bytes: int
) -> tuple[Runner, Loaded]:
    units = architecture.llama_units(shape)
    # Older checkpoints also store the RoPE frequencies, which are not weights.
    ignored = {name for name in loader.release.tensors if name.endswith("rotary_emb.inv_freq")}
    loader.check(units, shape.ties, ignored)
    layer = LayerShape(
        num_heads=shape.num_kv_heads, key_size=shape.head_dim, value_size=shape.head_dim
    )
    layers = [layer] * shape.num_layers
    cache_size = _plan_memory(loader, settings, units, shape.context, layers, promised_bytes)
    slots = _slots(loader, cache_size, layer, num_layers=shape.num_layers)
    loaded = loader.load(units)
    runner = llama.LlamaRunner(
        shape, loaded.units, slots, cache_size=cache_size, device=loader.device
    )
    return runner, loaded


def _load_generic(
    loader: Loader, settings: TorchEngineSettings, promised_bytes: int
) -> tuple[Runner, Loaded]:
    units = architecture.stored_units(loader.release)
    layers = generic.layer_shapes(loader.folder)
    built: Any = network.build_network(loader.folder, loader.dtype)
    context = generic.allowed_context(built.config)
    cache_size = _plan_memory(loader, settings, units, context, layers, promised_bytes)
    slots = [_slots(loader, cache_size, each, num_layers=1) for each in layers]
    loaded = loader.load(units)
    tensors = {name: each for name, each in loaded.units.items() if isinstance(each, torch.Tensor)}
    tied = {alias: tensors[name] for alias, name in loader.release.tied.items()}
    network.load_weights(built, tensors | tied)
    runner = generic.TransformersRunner(
        built, slots, layers, cache_size=cache_size, device=loader.device
    )
    # The parameters use the memory of the stored tensors, and the pool holds these weakly.
    used = {each.data_ptr() for each in built.state_dict().values()}
    runner.stored = [each for each in tensors.values() if each.data_ptr() in used]
    return runner, loaded


def _slots(
    loader: Loader, cache_size: KvCacheSize, layer: LayerShape, *, num_layers: int
) -> KeyValueSlots:
    """Slots for layers of the same shape. They are made before the weights are loaded, so that a
    refusal of the system comes early."""
    try:
        return KeyValueSlots(
            num_layers=num_layers,
            num_slots=cache_size.num_slots,
            num_kv_heads=layer.num_heads,
            num_tokens=cache_size.slot_tokens,
            head_dim=layer.head_dim,
            dtype=loader.dtype,
            device=loader.device,
        )
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
    StageError if there is too little memory for this cache and the weights."""
    is_paged = loader.device.type == "cpu"
    cache_size = _cache_size(
        settings,
        allowed,
        block_tokens=math.lcm(*(block_tokens(each.head_dim, loader.dtype) for each in layers)),
        token_bytes=sum(each.token_bytes(loader.dtype) for each in layers),
        is_paged=is_paged,
    )
    free = free_bytes(loader.device)
    weight_bytes, kv_bytes = loader.missing_bytes(units), cache_size.memory_bytes
    if is_paged:
        kv_bytes += sum(
            page_table_bytes(
                layer.num_heads,
                cache_size.num_slots,
                cache_size.slot_tokens * layer.head_dim * loader.dtype.itemsize,
            )
            for layer in layers
        )
    needed = weight_bytes + kv_bytes + settings.memory_reserve_bytes
    if free is not None and needed > free - promised_bytes:
        raise StageError(
            f"too little memory on {loader.device}: {loader.release.id} needs {weight_bytes} bytes "
            f"for weights and {kv_bytes} for keys and values, with "
            f"{settings.memory_reserve_bytes} to spare; {free} are free, of which other releases "
            f"may still take {promised_bytes}. "
            "Lower max_batch, max_context or kv_cache_bytes under [serving.torch]"
        )
    return cache_size


def _cache_size(
    settings: TorchEngineSettings,
    allowed: int,
    *,
    block_tokens: int,
    token_bytes: int,
    is_paged: bool,
) -> KvCacheSize:
    """The size of the KV cache. With `is_paged`, memory is taken in blocks. Without, each slot
    takes memory for a whole context. Raises StageError if not even one sequence fits."""
    block_bytes = block_tokens * token_bytes
    num_blocks = settings.kv_cache_bytes // block_bytes
    context = min(allowed, settings.max_context or allowed)
    fitting = num_blocks // (1 if is_paged else _MIN_SEQUENCES) * block_tokens
    if num_blocks * block_tokens < context and settings.max_context is None and fitting:
        # If a release allows a long context, serve it with a shorter one instead of refusing it.
        _log.warning(
            "kv_cache_bytes (%d) is too small for a sequence of %d tokens, which the release "
            "allows: max_context is lowered to %d",
            *(settings.kv_cache_bytes, context, fitting),
        )
        context = fitting
    slot_blocks = -(-context // block_tokens)
    if num_blocks < slot_blocks:
        raise StageError(
            f"one sequence of {context} tokens needs {slot_blocks * block_bytes} bytes of keys and "
            f"values, but kv_cache_bytes is {settings.kv_cache_bytes}; raise kv_cache_bytes or "
            "lower max_context, under [serving.torch]"
        )
    num_slots = _SLOTS_PER_SEQUENCE * settings.max_batch
    if not is_paged:
        num_slots = min(num_slots, num_blocks // slot_blocks)
    return KvCacheSize(
        num_slots=num_slots,
        num_blocks=min(num_blocks, num_slots * slot_blocks),
        block_tokens=block_tokens,
        block_bytes=block_bytes,
        context=context,
    )
