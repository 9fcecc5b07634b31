"""`HotpushWorker`: methods that are added to each vLLM worker, to replace its weights.
`collective_rpc` calls them by name. While a worker answers a call, it computes no tokens. So all
calls but `hotpush_prepare` and `hotpush_commit` return at once.

New weights are first staged in host memory while the old ones are in use; a commit then replaces
the old ones at once. `CopiedWeights` uses a shadow: a second model of vLLM's classes, in host
memory, which vLLM does not know and which never computes. Its loaders show into which fused
parameters vLLM loads each tensor of a checkpoint, and it packs weights in the same way as vLLM. A
commit copies or exchanges only what differs. `ReloadedWeights` lets vLLM's own reload do all this,
from tensors in memory.
"""

import copy
import logging
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from vllm.config import CompilationMode, set_current_vllm_config
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype

from serving.errors import ReleaseError
from serving.weights.release import tensor_digest
from serving.weights.shards import (
    free_bytes,
    is_finite,
    read_tensors,
    tensor_bytes,
    yield_to_other_threads,
)
from serving.weights.verify import wrong_digest

_log = logging.getLogger(__name__)

StoredTensors = Mapping[str, tuple[str, str]]
"""Tensor name → (shard, digest of the tensor)."""

# Weights with any other method are transformed after loading, so they are left to vLLM's reload.
_PLAIN_METHODS = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)


class HotpushWorker:
    """vLLM makes this a base class of its worker and never calls `__init__`, so `hotpush_prepare`
    must be called first. All names have a prefix, so that none is also a name of vLLM's worker."""

    def hotpush_prepare(
        self, release_id: str, folder: str, tensors: StoredTensors, way: str, server_pid: int
    ) -> dict[str, Any]:
        """Call it after vLLM has started on a release, before the first request. It prepares later
        swaps. Returns the worker's pid, and the reason if it does not copy weights but reloads
        them."""
        if hasattr(os, "pidfd_open"):
            threading.Thread(target=_end_with_server, args=(server_pid,), daemon=True).start()
        self.hotpush_thread = ThreadPoolExecutor(1, "hotpush-staging", yield_to_other_threads)
        self.hotpush_staging: Future[int]
        self.hotpush_weights: CopiedWeights | ReloadedWeights
        source = release_id, Path(folder), tensors
        reason = None if way == "copy" else "the settings say so"
        if reason is None:
            try:
                self.hotpush_weights = CopiedWeights(self, *source)
            # After any error, vLLM's own reload can still be used.
            except Exception as error:
                _log.info("no second copy of the model", exc_info=True)
                reason = f"{type(error).__name__}: {error}"
        if reason is not None:
            self.hotpush_weights = ReloadedWeights(self, *source)
        return {"pid": os.getpid(), "reason": reason}

    def hotpush_take_turn(self) -> None:
        """Does nothing. A worker that hangs does not answer the call."""

    def hotpush_stage(self, release_id: str, folder: str, tensors: StoredTensors) -> None:
        """Begin to stage on another thread. `hotpush_status` tells when this has ended."""
        self.hotpush_staging = self.hotpush_thread.submit(
            self.hotpush_weights.stage, release_id, Path(folder), tensors
        )

    def hotpush_status(self) -> dict[str, Any] | None:
        """How the last staging has ended; None while it goes on."""
        if not self.hotpush_staging.done():
            return None
        match self.hotpush_staging.exception():
            case None:
                return {"reasons": [], "read_bytes": self.hotpush_staging.result()}
            case ReleaseError() as error:
                return {"reasons": list(error.reasons)}
            case error:
                return {"reasons": [f"{type(error).__name__}: {error}"]}

    def hotpush_commit(self, release_id: str) -> float:
        """Returns for how many seconds the worker computed no tokens."""
        started = time.perf_counter()
        self.hotpush_weights.commit(release_id)
        return time.perf_counter() - started

    def hotpush_forget(self, release_id: str) -> None:
        """Free the release, after its staging has ended."""
        self.hotpush_thread.submit(self.hotpush_weights.forget, release_id)


def _end_with_server(server_pid: int) -> None:
    """End vLLM when the server is killed. Otherwise its processes would wait for the server for
    ever."""
    engine_pid = os.getppid()
    with suppress(ProcessLookupError):
        # Readable as soon as the process has ended, even if its parent does not wait for it.
        select.select([os.pidfd_open(server_pid)], [], [])
        os.kill(engine_pid, signal.SIGKILL)
    os._exit(1)


class CannotCopy(Exception):
    """The weights of this model cannot be replaced by copying. The message says why."""


@dataclass(frozen=True, kw_only=True)
class _HostWeights:
    """One release in host memory. Its tensors never change after they are made, because several
    releases share equal ones."""

    stored: StoredTensors
    params: dict[str, torch.Tensor]
    """vLLM's name of a fused parameter → its value."""
    packed: dict[str, Callable[..., torch.Tensor]]
    """Module name → the function that computes its product with a packed weight. Only on a CPU."""


class CopiedWeights:
    def __init__(self, worker: Any, release_id: str, folder: Path, tensors: StoredTensors) -> None:
        """`worker` has loaded the release. Raises CannotCopy, and any other exception if vLLM
        cannot build or load the shadow."""
        check_plain(worker)
        self._live_model: nn.Module = worker.model_runner.get_model()
        self._is_cpu = worker.device.type == "cpu"
        self._shadow = _build_shadow(worker.vllm_config)
        # A device needs one more copy, in pinned memory.
        _check_memory((1 if self._is_cpu else 2) * _num_bytes(self._shadow.parameters()))
        weight_map = {name: file for name, (file, _) in tensors.items()}
        self._targets = _load_and_trace(self._shadow, read_tensors(folder, weight_map))
        params = {name: self._pinned(param.data) for name, param in self._shadow.named_parameters()}
        self._adopt_if_equal(params)
        packed = {
            name: module.cpu_linear
            for name, module in self._live_model.named_modules()
            if hasattr(module, "cpu_linear")
        }
        self._live_id = release_id
        self._host_weights = {
            release_id: _HostWeights(stored=tensors, params=params, packed=packed)
        }

    def stage(self, release_id: str, folder: Path, tensors: StoredTensors) -> int:
        """Read the tensors that differ from those of the live release, while its weights are in
        use. Returns the number of bytes read. Raises ReleaseError."""
        base = self._host_weights[self._live_id]
        changed = {
            name: (file, digest)
            for name, (file, digest) in tensors.items()
            if digest != base.stored[name][1]
        }
        touched = {target for name in changed for target in self._targets[name]}
        # Fused parameters count completely, even if only a part of them changes. Each parameter is
        # stored twice: on a CPU also packed, else also in pinned memory.
        _check_memory(2 * _num_bytes(base.params[name] for name in touched))
        for name, param in self._shadow.named_parameters():
            param.data = base.params[name].clone() if name in touched else base.params[name]
        num_bytes = 0
        for name, tensor in _read_checked(folder, changed):
            self._shadow.load_weights([(name, tensor)])  # type: ignore[operator]
            num_bytes += tensor.nbytes
        loaded = {
            name: self._pinned(param.data)
            for name, param in self._shadow.named_parameters()
            if name in touched
        }
        packed = self._pack_touched(touched, base.packed.keys())
        self._host_weights[release_id] = _HostWeights(
            stored=tensors, params=base.params | loaded, packed=base.packed | packed
        )
        return num_bytes

    def commit(self, release_id: str) -> None:
        """Make the release's weights the live ones. No request may run."""
        before, after = self._host_weights[self._live_id], self._host_weights[release_id]
        with torch.no_grad():
            for name, param in self._live_model.named_parameters():
                # On a CPU, vLLM empties a parameter that it uses only in packed form.
                if after.params[name] is not before.params[name] and param.numel():
                    self._set(param, after.params[name])
            for name, module in self._live_model.named_modules():
                if name in after.packed:
                    module.cpu_linear = after.packed[name]
        if not self._is_cpu:
            torch.accelerator.synchronize()
        self._live_id = release_id

    def forget(self, release_id: str) -> None:
        self._host_weights.pop(release_id, None)

    def _set(self, param: nn.Parameter, value: torch.Tensor) -> None:
        if self._is_cpu and value.dtype == param.dtype:
            # On a CPU no CUDA graph holds the address of the memory, so it can be exchanged, which
            # takes no time.
            param.data = value
        else:
            param.data.copy_(value, non_blocking=True)

    def _pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copied to pinned memory for a device, because copying to the device from there is several
        times as fast."""
        return tensor if self._is_cpu else tensor.pin_memory()

    def _pack_touched(
        self, touched: set[str], packable: Iterable[str]
    ) -> dict[str, Callable[..., torch.Tensor]]:
        """Packs the weights of changed modules as vLLM does after a cold start. Returns module name
        → product. This includes modules with a tied weight. vLLM's own reload forgets those, and
        then computes logits with the old head."""
        changed = {id(param) for name, param in self._shadow.named_parameters() if name in touched}
        modules = dict(self._shadow.named_modules())
        return {
            name: _pack(modules[name])
            for name in packable
            if any(id(param) in changed for param in modules[name].parameters(recurse=False))
        }

    def _adopt_if_equal(self, params: Mapping[str, torch.Tensor]) -> None:
        """Make the live model compute with `params`, so that a CPU does not hold the same weights
        twice. Raises CannotCopy if they are not the weights that vLLM has loaded. Then the shadow
        is not built as vLLM builds the model."""
        live = dict(self._live_model.named_parameters())
        if merged := params.keys() - live.keys():
            # They may differ in the next checkpoint.
            names = ", ".join(sorted(merged))
            raise CannotCopy(f"{names}: vLLM has tied it to the embedding, as they are equal here")
        for name, param in live.items():
            if not param.numel():
                continue
            expected = params.get(name)
            if expected is None or expected.shape != param.shape:
                raise CannotCopy(f"{name}: vLLM transforms it after loading")
            if not torch.equal(param.data.cpu(), expected.to(param.dtype)):
                raise CannotCopy(f"{name}: vLLM computes with other values than the checkpoint's")
            self._set(param, expected)


class ReloadedWeights:
    def __init__(self, worker: Any, release_id: str, folder: Path, tensors: StoredTensors) -> None:
        self._worker = worker
        self._sources = {release_id: (folder, tensors)}
        self._staged: dict[str, dict[str, torch.Tensor]] = {}

    def stage(self, release_id: str, folder: Path, tensors: StoredTensors) -> int:
        """Read all tensors. Returns the number of bytes read. Raises ReleaseError."""
        files = {folder / file for file, _ in tensors.values()}
        _check_memory(sum(file.stat().st_size for file in files))
        found = {name: tensor.clone() for name, tensor in _read_checked(folder, tensors)}
        self._sources[release_id] = folder, tensors
        self._staged[release_id] = found
        return _num_bytes(found.values())

    def commit(self, release_id: str) -> None:
        """Make the release's weights the live ones. No request may run. The weights of an earlier
        release are read again, because only those of the next one are in memory."""
        tensors = self._staged.pop(release_id, None) or _read_checked(*self._sources[release_id])
        model_runner = self._worker.model_runner
        with set_current_vllm_config(self._worker.vllm_config):
            model_runner.reload_weights(weights_iterator=iter(dict(tensors).items()))
            # vLLM reloads a tied weight through the embedding. It does not pack the head again, so
            # the head would keep the old weight.
            for module in model_runner.get_model().modules():
                method = getattr(module, "quant_method", None)
                if isinstance(method, UnquantizedEmbeddingMethod) and hasattr(module, "cpu_linear"):
                    method.process_weights_after_loading(module)

    def forget(self, release_id: str) -> None:
        self._staged.pop(release_id, None)
        self._sources.pop(release_id, None)


def check_plain(worker: Any) -> None:
    """Raises CannotCopy if vLLM transforms the model's weights after it has loaded them."""
    config = worker.vllm_config
    model = worker.model_runner.get_model()
    is_special = {
        "it is quantised": config.model_config.quantization is not None,
        "it has latent attention (MLA)": config.model_config.use_mla,
        "it has state-space layers": config.model_config.is_hybrid,
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


def _build_shadow(vllm_config: Any) -> nn.Module:
    config = copy.copy(vllm_config)
    config.compilation_config = copy.copy(vllm_config.compilation_config)
    config.compilation_config.mode = CompilationMode.NONE
    # Each layer registers itself here under its name, and vLLM refuses a name that exists.
    config.compilation_config.static_forward_context = {}
    with set_default_torch_dtype(config.model_config.dtype), torch.device("cpu"):
        shadow: nn.Module = initialize_model(config)
    return shadow


def _load_and_trace(
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
    if missed := names.difference(*targets.values()):
        raise CannotCopy(f"{', '.join(sorted(missed)[:3])}: not in the checkpoint")
    return targets


def _pack(module: nn.Module) -> Callable[..., torch.Tensor]:
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


def _num_bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _check_memory(needed: int) -> None:
    """Raises ReleaseError if there is too little host memory."""
    free = free_bytes()
    if free is not None and needed > free:
        raise ReleaseError(f"too little memory: {needed} bytes are needed, {free} are free")


def _read_checked(folder: Path, tensors: StoredTensors) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors. Raises ReleaseError if a tensor has NaN or infinity, or if its digest is
    wrong."""
    weight_map = {name: file for name, (file, _) in tensors.items()}
    for name, tensor in read_tensors(folder, weight_map).items():
        file, expected = tensors[name]
        if not is_finite(tensor):
            raise ReleaseError(f"{file}: tensor {name}: holds NaN or infinity")
        found = tensor_digest(tensor_bytes(tensor))
        if found != expected:
            raise ReleaseError(wrong_digest(file, name, found=found, expected=expected))
        yield name, tensor
