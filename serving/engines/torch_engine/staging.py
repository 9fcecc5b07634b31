"""From a release's folder to a runner that holds it. It runs on a thread that yields to others."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from serving.engine import StageError
from serving.engines.torch_engine import architecture, generic, llama, llama_units
from serving.engines.torch_engine.architecture import LlamaShape
from serving.engines.torch_engine.device import choose_dtype, free_bytes, yield_the_cores
from serving.engines.torch_engine.loading import Loader, UnitPool
from serving.engines.torch_engine.runner import Runner
from serving.engines.torch_engine.settings import TorchEngineSettings
from serving.engines.torch_engine.slots import KeyValueSlots
from serving.weights.network import context_length
from serving.weights.release import Release

_log = logging.getLogger(__name__)

SEQUENCES_OF_LESS = 4
"""That have room where the context is lowered to what there is memory for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Staged:
    runner: Runner
    read_bytes: int
    shared_bytes: int
    seconds: float


def load_runner(
    release: Release,
    folder: Path,
    *,
    pool: UnitPool,
    settings: TorchEngineSettings,
    device: torch.device,
    is_cancelled: Callable[[], bool],
    pause_share: Callable[[], float],
) -> Staged:
    """Raises StageError, StagingCancelled. Blocks; the calling thread is made a low-priority one.

    Manifest and memory are checked before anything is read.
    """
    yield_the_cores()
    started = time.perf_counter()
    config = architecture.read_config(folder)
    loader = Loader(
        release=release,
        folder=folder,
        pool=pool,
        dtype=choose_dtype(settings, device, architecture.stored_dtype(config)),
        device=device,
        is_cancelled=is_cancelled,
        pause_share=pause_share,
    )
    shape = architecture.llama_shape(config)
    with torch.inference_mode():
        load = _load_generic if shape is None else lambda *args: _load_llama(shape, *args)
        runner, read_bytes, shared_bytes = load(loader, settings)
    staged = Staged(
        runner=runner,
        read_bytes=read_bytes,
        shared_bytes=shared_bytes,
        seconds=time.perf_counter() - started,
    )
    _log.info(
        "staged %s in %.2f s: read %d bytes, shared %d bytes",
        release.id,
        staged.seconds,
        read_bytes,
        shared_bytes,
    )
    return staged


def _load_llama(
    shape: LlamaShape, loader: Loader, settings: TorchEngineSettings
) -> tuple[Runner, int, int]:
    units = llama_units.units(shape)
    ignored = llama_units.ignored(loader.release.tensors)
    loader.check(units, llama_units.ties(shape), ignored)
    token_bytes = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * loader.dtype.itemsize
    context, num_slots = _context_and_slots(settings, shape.context, token_bytes)
    _check_memory(loader, settings, loader.missing_bytes(units), num_slots * context * token_bytes)
    loaded = loader.load(units)
    slots = KeyValueSlots(
        num_layers=shape.num_layers,
        num_slots=num_slots,
        num_kv_heads=shape.num_kv_heads,
        context=context,
        head_dim=shape.head_dim,
        dtype=loader.dtype,
        device=loader.device,
    )
    runner = llama.LlamaRunner(
        shape,
        loaded.units,
        slots,
        num_slots=num_slots,
        context=context,
        device=loader.device,
    )
    return runner, loaded.read_bytes, loaded.shared_bytes


def _load_generic(loader: Loader, settings: TorchEngineSettings) -> tuple[Runner, int, int]:
    network: Any = generic.build_network(loader.folder)
    sources = generic.find_sources(network, loader.release)
    units = generic.units(sources)
    loader.check(units, sources.ties, sources.ignored)
    shapes = generic.layer_shapes(loader.folder)
    token_bytes = generic.token_bytes(shapes, loader.dtype)
    context, num_slots = _context_and_slots(settings, context_length(network.config), token_bytes)
    _check_memory(loader, settings, loader.missing_bytes(units), num_slots * context * token_bytes)
    loaded = loader.load(units)
    runner = generic.TransformersRunner(
        network,
        loaded.units,
        shapes,
        num_slots=num_slots,
        context=context,
        device=loader.device,
    )
    return runner, loaded.read_bytes, loaded.shared_bytes


def _context_and_slots(
    settings: TorchEngineSettings, allowed: int, token_bytes: int
) -> tuple[int, int]:
    """Tokens of a sequence at most, and how many such sequences there is room for."""
    context = min(allowed, settings.max_context or allowed)
    fitting = settings.kv_cache_bytes // token_bytes
    if fitting < context and settings.max_context is None and fitting >= SEQUENCES_OF_LESS:
        # Models of a long context are served with a shorter one, rather than not at all.
        context = fitting // SEQUENCES_OF_LESS
        _log.warning(
            "kv_cache_bytes (%d) holds no sequence of the %d tokens that the release allows: "
            "max_context is %d",
            *(settings.kv_cache_bytes, allowed, context),
        )
    if fitting < context:
        raise StageError(
            f"one sequence of {context} tokens needs {context * token_bytes} bytes of keys and "
            f"values, kv_cache_bytes is {settings.kv_cache_bytes}; raise it, or lower max_context, "
            "under [serving.torch]"
        )
    return context, min(settings.max_batch, fitting // context)


def _check_memory(
    loader: Loader, settings: TorchEngineSettings, weight_bytes: int, kv_bytes: int
) -> None:
    free = free_bytes(loader.device)
    needed = weight_bytes + kv_bytes + settings.memory_reserve_bytes
    if free is not None and needed > free:
        raise StageError(
            f"too little memory on {loader.device}: {loader.release.id} needs {weight_bytes} bytes "
            f"for weights and {kv_bytes} for keys and values, with "
            f"{settings.memory_reserve_bytes} to spare; {free} are free. "
            "Lower max_batch, max_context or kv_cache_bytes under [serving.torch]"
        )
