"""Weights of a vLLM worker: staged in host memory beside the live ones, then committed at once.

`CopiedWeights` lets a shadow of the model (vLLM's own classes and loaders, in host memory) put a
checkpoint's tensors into the fused parameters and pack them as vLLM packs; a commit then copies or
exchanges what differs, and nothing else. `ReloadedWeights` leaves all of it to vLLM's own reload,
from memory. Both run inside the worker's process and know nothing of requests.
"""

import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from serving.engines.vllm_shadow import (
    CannotCopy,
    build_shadow,
    check_memory,
    check_plain,
    check_same_ties,
    load_and_trace,
    pack,
)
from serving.weights.digests import tensor_digest
from serving.weights.shards import is_finite, read_tensors, tensor_bytes
from serving.weights.verify import wrong_digest

Changed = Mapping[str, tuple[str, str]]
"""Tensor name → (shard, digest of the tensor)."""

_STAGING_NICENESS = 5


class StagingFailed(Exception):
    """The release is not fit to be loaded; the message names file and tensor."""


class WeightsInMemory(Protocol):
    way: str

    def needed_bytes(self, stored: Mapping[str, int]) -> int:
        """Host memory to stage these tensors, which are given with their stored bytes."""

    def stage(self, release_id: str, base_id: str, folder: Path, changed: Changed) -> int:
        """Read `changed`, which is what differs from the release `base_id`.

        Bytes read. It may run on a thread of its own while the live weights are in use. Raises
        StagingFailed, ReleaseError.
        """

    def commit(self, release_id: str) -> None:
        """While no request runs: the live weights become these."""

    def forget(self, release_id: str) -> None:
        """Free what was staged, if it is not live."""


@dataclass(frozen=True, kw_only=True)
class _HostWeights:
    """One release in host memory. Nothing in it is written to once it is made, so that releases
    share what is equal."""

    params: dict[str, torch.Tensor]
    """As the fused parameters, by vLLM's names."""
    packed: dict[str, Callable[..., torch.Tensor]]
    """On a CPU, by module: the product with its packed weight."""


class CopiedWeights:
    way = "copy"

    def __init__(self, worker: Any, release_id: str, folder: Path, weight_map: Mapping[str, str]):
        """Raises CannotCopy. Call it on the worker's thread, while no request runs."""
        check_plain(worker)
        self._live_model: nn.Module = worker.model_runner.get_model()
        self._is_cpu = worker.device.type == "cpu"
        self._shadow = build_shadow(worker.vllm_config)
        check_same_ties(self._shadow, self._live_model)
        # On a device it is pinned, which is one copy more.
        check_memory(self._shadow, num_copies=1 if self._is_cpu else 2)
        self._targets = load_and_trace(self._shadow, read_tensors(folder, weight_map))
        params = {name: param.data for name, param in self._shadow.named_parameters()}
        self._host_weights = {
            release_id: _HostWeights(
                params={name: self._pinned(param) for name, param in params.items()},
                packed={
                    name: module.cpu_linear
                    for name, module in self._live_model.named_modules()
                    if hasattr(module, "cpu_linear")
                },
            )
        }
        self._live_id = release_id
        self._staging = threading.Lock()
        self._check_equal_to_live()

    def needed_bytes(self, stored: Mapping[str, int]) -> int:
        """Parameters as they are computed with, fused: whole, whatever part of them changes."""
        params = self._host_weights[self._live_id].params
        # On a CPU packed once more, else pinned.
        return 2 * sum(params[name].nbytes for name in self._touched(stored))

    def stage(self, release_id: str, base_id: str, folder: Path, changed: Changed) -> int:
        with self._staging:  # one that nobody wants any more may not have ended yet
            return self._stage(release_id, self._host_weights[base_id], folder, changed)

    def _stage(self, release_id: str, base: _HostWeights, folder: Path, changed: Changed) -> int:
        touched = self._touched(changed)
        for name, param in self._shadow.named_parameters():
            param.data = base.params[name].clone() if name in touched else base.params[name]
        num_bytes = 0
        for name, tensor in _read_changed(folder, changed):
            self._shadow.load_weights([(name, tensor)])  # type: ignore[operator]
            num_bytes += tensor.nbytes
        params = dict(base.params)
        for name, param in self._shadow.named_parameters():
            if name in touched:
                params[name] = self._pinned(param.data)
        self._host_weights[release_id] = _HostWeights(
            params=params, packed=base.packed | self._pack_touched(touched, set(base.packed))
        )
        return num_bytes

    def commit(self, release_id: str) -> None:
        before, after = self._host_weights[self._live_id], self._host_weights[release_id]
        with torch.no_grad():
            for name, param in self._live_model.named_parameters():
                # A parameter that lives on in packed form only is empty.
                if after.params[name] is not before.params[name] and param.numel():
                    self._set(param, after.params[name])
            for name, module in self._live_model.named_modules():
                if name in after.packed:
                    module.cpu_linear = after.packed[name]
        if not self._is_cpu:
            torch.accelerator.synchronize()
        self._live_id = release_id

    def forget(self, release_id: str) -> None:
        if release_id != self._live_id:
            self._host_weights.pop(release_id, None)

    def _touched(self, names: Iterable[str]) -> set[str]:
        return {target for name in names for target in self._targets[name]}

    def _set(self, param: nn.Parameter, value: torch.Tensor) -> None:
        if self._is_cpu and value.dtype == param.dtype:
            # No graph holds the address: exchanging the memory takes no time at all.
            param.data = value
        else:
            param.data.copy_(value, non_blocking=True)

    def _pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        """Pinned where it is copied to a device: that is several times as fast."""
        return tensor if self._is_cpu else tensor.pin_memory()

    def _pack_touched(
        self, touched: set[str], packable: set[str]
    ) -> dict[str, Callable[..., torch.Tensor]]:
        """By module, as vLLM packs after a cold start. A module of a tied weight counts as well:
        vLLM's reload forgets those, and goes on computing logits with the old head."""
        if not self._is_cpu:
            return {}
        changed = {id(param) for name, param in self._shadow.named_parameters() if name in touched}
        packed = {}
        for name, module in self._shadow.named_modules():
            if name in packable and any(id(p) in changed for p in module.parameters(recurse=False)):
                packed[name] = pack(module)
        return packed

    def _check_equal_to_live(self) -> None:
        """The shadow must hold what vLLM itself loaded: if not, its model is not understood."""
        image = self._host_weights[self._live_id]
        for name, param in self._live_model.named_parameters():
            if not param.numel():
                continue
            expected = image.params.get(name)
            if expected is None or expected.shape != param.shape:
                raise CannotCopy(f"{name}: vLLM transforms it after loading")
            if not torch.equal(param.data.cpu(), expected.to(param.dtype)):
                raise CannotCopy(f"{name}: vLLM computes with other values than the checkpoint's")
            self._set(param, expected)


class ReloadedWeights:
    way = "reload"

    def __init__(self, worker: Any, release_id: str) -> None:
        self._worker = worker
        self._live_id = release_id
        self._staged: dict[str, dict[str, torch.Tensor]] = {}

    def needed_bytes(self, stored: Mapping[str, int]) -> int:
        return sum(stored.values())

    def stage(self, release_id: str, base_id: str, folder: Path, changed: Changed) -> int:
        found = {}
        for name, tensor in _read_changed(folder, changed):
            found[name] = tensor.clone()
        self._staged[release_id] = found
        return sum(tensor.nbytes for tensor in found.values())

    def commit(self, release_id: str) -> None:
        if release_id == self._live_id:
            return
        tensors = self._staged[release_id]
        with set_current_vllm_config(self._worker.vllm_config):
            self._worker.model_runner.reload_weights(weights_iterator=iter(tensors.items()))
            self._pack_embeddings()
        self._live_id = release_id

    def forget(self, release_id: str) -> None:
        self._staged.pop(release_id, None)

    def _pack_embeddings(self) -> None:
        # vLLM reloads a tied weight through the embedding, and leaves the head's packed copy stale.
        for module in self._worker.model_runner.get_model().modules():
            method = getattr(module, "quant_method", None)
            if isinstance(method, UnquantizedEmbeddingMethod) and hasattr(module, "cpu_linear"):
                method.process_weights_after_loading(module)


def _read_changed(folder: Path, changed: Changed) -> Iterator[tuple[str, torch.Tensor]]:
    """Each one finite, and proved by its digest."""
    weight_map = {name: file for name, (file, _) in changed.items()}
    for name, tensor in read_tensors(folder, weight_map).items():
        file, expected = changed[name]
        if not is_finite(tensor):
            raise StagingFailed(f"{file}: tensor {name}: holds NaN or infinity")
        found = tensor_digest(tensor_bytes(tensor), like=expected)
        if found != expected:
            raise StagingFailed(wrong_digest(file, name, found=found, expected=expected))
        yield name, tensor


def lower_thread_priority() -> None:
    """Make the calling thread one that takes little beside the worker's."""
    if sys.platform == "linux":
        # On Linux a nice value is a thread's own; 0 is the calling thread.
        os.setpriority(os.PRIO_PROCESS, 0, _STAGING_NICENESS)
