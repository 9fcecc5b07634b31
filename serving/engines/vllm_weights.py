"""Replaces the weights of a vLLM worker. New weights are first staged in host memory while the old
ones are in use; a commit then replaces the old ones at once.

`CopiedWeights` uses a shadow of the model (vLLM's classes and loaders, in host memory) to load a
checkpoint's tensors into fused parameters and to pack them as vLLM does. Its commit copies or
exchanges only what differs. `ReloadedWeights` lets vLLM's own reload do all this, from tensors in
memory. Both run in the worker's process, and know nothing about requests.
"""

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
from serving.weights.release import tensor_digest
from serving.weights.shards import is_finite, read_tensors, tensor_bytes
from serving.weights.verify import wrong_digest

Changed = Mapping[str, tuple[str, str]]
"""Tensor name → (shard, digest of the tensor)."""


class StagingFailed(Exception):
    """The release cannot be loaded. The message names the file and the tensor."""


class WeightsInMemory(Protocol):
    way: str

    def needed_bytes(self, stored: Mapping[str, int]) -> int:
        """The host memory that is needed to stage these tensors. `stored` is tensor name → bytes in
        the shard."""

    def stage(self, release_id: str, base_id: str, folder: Path, changed: Changed) -> int:
        """Read `changed`, the tensors that differ from those of the release `base_id`. Returns the
        number of bytes read.

        It may run on another thread while the live weights are in use. Raises StagingFailed and
        ReleaseError.
        """

    def commit(self, release_id: str) -> None:
        """Make the release's weights the live ones. No request may run."""

    def forget(self, release_id: str) -> None:
        """Free the staged weights of the release, unless they are live."""


@dataclass(frozen=True, kw_only=True)
class _HostWeights:
    """One release in host memory. Its tensors never change after they are made, because several
    releases share equal ones."""

    params: dict[str, torch.Tensor]
    """vLLM's name of a fused parameter → its value."""
    packed: dict[str, Callable[..., torch.Tensor]]
    """Module name → the function that computes its product with a packed weight. Only on a CPU."""


class CopiedWeights:
    way = "copy"

    def __init__(self, worker: Any, release_id: str, folder: Path, weight_map: Mapping[str, str]):
        """Call it on the worker's thread, while no request runs. Raises CannotCopy."""
        check_plain(worker)
        self._live_model: nn.Module = worker.model_runner.get_model()
        self._is_cpu = worker.device.type == "cpu"
        self._shadow = build_shadow(worker.vllm_config)
        check_same_ties(self._shadow, self._live_model)
        # For a device, each parameter is also copied to pinned memory.
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
        """Fused parameters count completely, even if only a part of them changes."""
        params = self._host_weights[self._live_id].params
        # Each parameter is stored twice: on a CPU also packed, else also in pinned memory.
        return 2 * sum(params[name].nbytes for name in self._touched(stored))

    def stage(self, release_id: str, base_id: str, folder: Path, changed: Changed) -> int:
        with self._staging:  # a cancelled staging may still be running
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
        if release_id != self._live_id:
            self._host_weights.pop(release_id, None)

    def _touched(self, names: Iterable[str]) -> set[str]:
        return {target for name in names for target in self._targets[name]}

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
        self, touched: set[str], packable: set[str]
    ) -> dict[str, Callable[..., torch.Tensor]]:
        """Packs the weights of changed modules as vLLM does after a cold start. Returns module name
        → product. This includes modules with a tied weight. vLLM's own reload forgets those, and
        then computes logits with the old head."""
        if not self._is_cpu:
            return {}
        changed = {id(param) for name, param in self._shadow.named_parameters() if name in touched}
        packed = {}
        for name, module in self._shadow.named_modules():
            if name in packable and any(id(p) in changed for p in module.parameters(recurse=False)):
                packed[name] = pack(module)
        return packed

    def _check_equal_to_live(self) -> None:
        """Raises CannotCopy if the shadow does not have the weights that vLLM has loaded. Then the
        shadow is not built as vLLM builds the model."""
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
        # vLLM reloads a tied weight through the embedding. It does not pack the head again,
        # so the head would keep the old weight.
        for module in self._worker.model_runner.get_model().modules():
            method = getattr(module, "quant_method", None)
            if isinstance(method, UnquantizedEmbeddingMethod) and hasattr(module, "cpu_linear"):
                method.process_weights_after_loading(module)


def _read_changed(folder: Path, changed: Changed) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the changed tensors. Raises StagingFailed if a tensor has NaN or infinity, or if its
    digest is wrong."""
    weight_map = {name: file for name, (file, _) in changed.items()}
    for name, tensor in read_tensors(folder, weight_map).items():
        file, expected = changed[name]
        if not is_finite(tensor):
            raise StagingFailed(f"{file}: tensor {name}: holds NaN or infinity")
        found = tensor_digest(tensor_bytes(tensor))
        if found != expected:
            raise StagingFailed(wrong_digest(file, name, found=found, expected=expected))
        yield name, tensor
