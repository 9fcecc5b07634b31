"""Reads the shards of a release and builds units: checks, converts and fuses the tensors. A unit is
a piece of a network. Units that another release in memory already has are shared."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakValueDictionary

import torch
from blake3 import blake3
from torch import Tensor

from serving.engine import StageError
from serving.engines.torch_engine.linear import Linear
from serving.weights.release import Release, spelled_digest
from serving.weights.shards import is_finite, read_tensors, tensor_bytes
from serving.weights.verify import wrong_digest

# The number of elements that are processed at once. This takes some milliseconds, short enough that
# no other thread waits long for the core.
_BLOCK_ELEMENTS = 1 << 20

Built = Linear | Tensor
UnitKey = tuple[tuple[bool, tuple["Part", ...], torch.dtype], tuple[str, ...]]
"""Equal for equal units: the form of the unit, and the digests of its stored tensors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """The form in which a unit holds a stored tensor."""

    shape: tuple[int, ...]
    rotated_head_dim: int | None = None
    """If this is set, the two rows of each rotating pair are made adjacent, in each head of this
    size. Checkpoints store the real half of a head before its imaginary half. Queries and keys are
    only multiplied with each other, so any order gives the same products if both have it."""
    is_float32: bool = False
    """Whether the values are held in float32, whatever the dtype of the network is."""

    def prepare(self, values: Tensor) -> Tensor:
        """Converts the stored values to this form."""
        if self.rotated_head_dim is not None:
            halves = values.reshape(-1, 2, self.rotated_head_dim // 2, *values.shape[1:])
            values = halves.transpose(1, 2).flatten(0, 2)
        return values.float() if self.is_float32 else values


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """Two units with equal forms and equal digests of their parts are equal. Releases in memory
    share such units."""

    parts: Mapping[str, Part]
    """Name of a stored tensor → its form."""
    is_linear: bool = False
    """Whether the parts are stacked into one `Linear`: weights have two dimensions, biases have
    one. If not, the unit is the tensor of its only part."""

    @property
    def numel(self) -> int:
        return sum(math.prod(part.shape) for part in self.parts.values())

    def build(self, values: list[Tensor]) -> Built:
        """`values` are the prepared values of all parts. The unit may keep their memory."""
        if not self.is_linear:
            return values[0]
        weights = [each for each in values if each.dim() == 2]
        biases = [each for each in values if each.dim() == 1]
        return Linear(_stack(weights), _stack(biases) if biases else None)

    def part_of(self, built: Linear, number: int) -> Tensor:
        """The prepared values of one part, taken from a `Linear` of this form: some rows of the
        weight, or of the bias if the part has one dimension."""
        shapes = [part.shape for part in self.parts.values()]
        rows = [shape[0] for shape in shapes[:number] if len(shape) == len(shapes[number])]
        whole = built.bias if len(shapes[number]) == 1 else built.plain_weight()
        assert whole is not None
        return whole[sum(rows) : sum(rows) + shapes[number][0]]


class UnitPool(WeakValueDictionary[UnitKey, Built]):
    """The units of all releases in memory. The pool holds weak references only, so a unit is freed
    together with the last release that uses it."""

    def find_with_part(self, key: UnitKey, number: int) -> Built | None:
        """A unit of the same form, whose part with this number has the same digest."""
        form, digests = key
        for (other, others), unit in self.items():
            if other == form and others[number] == digests[number]:
                return unit
        return None


class StagingCancelled(Exception):
    """The load was cancelled, because the release is no longer wanted."""


@dataclass(kw_only=True, slots=True)
class Loader:
    """Loads one release."""

    release: Release
    folder: Path
    pool: UnitPool
    dtype: torch.dtype
    is_cancelled: Callable[[], bool]
    pause_share: Callable[[], float]
    """Seconds to pause for each second of work. The pauses leave memory bandwidth to running
    requests."""
    read_bytes: int = 0
    """Bytes of the tensors that were read from shards."""

    def check(self, units: Mapping[str, Unit]) -> None:
        """Raises StageError with every tensor in which the manifest does not fit the network. No
        shard is read."""
        stored = self.release.tensors
        needed = {
            self._stored(name): part for unit in units.values() for name, part in unit.parts.items()
        }
        reasons = [
            f"tensor {name}: in no shard of the release" for name in needed if name not in stored
        ]
        for name, entry in stored.items():
            where = f"{entry.file}: tensor {name}"
            if name not in needed:
                # Older checkpoints also store the RoPE frequencies, which are not weights.
                if not name.endswith("rotary_emb.inv_freq"):
                    reasons.append(f"{where}: the network of config.json has no such tensor")
            elif entry.shape != needed[name].shape:
                reasons.append(
                    f"{where}: has shape {list(entry.shape)}, "
                    f"config.json asks for {list(needed[name].shape)}"
                )
            elif entry.dtype not in ("F32", "F16", "BF16", "F64"):
                reasons.append(
                    f"{where}: has dtype {entry.dtype}, "
                    "the network computes with floating-point numbers"
                )
        if reasons:
            raise StageError(*reasons)

    def missing_bytes(self, units: Mapping[str, Unit]) -> int:
        """The memory that the new units will take. Memory that is freed during `load` does not
        count."""
        fresh = {self._key(unit): unit.numel for unit in units.values()}
        return sum(
            numel * self.dtype.itemsize for key, numel in fresh.items() if key not in self.pool
        )

    def load(self, units: Mapping[str, Unit]) -> dict[str, Built]:
        """Build all units. Raises ReleaseError, StageError and StagingCancelled."""
        built: dict[str, Built] = {}
        for place, unit in units.items():
            key = self._key(unit)
            found = self.pool.get(key)
            if found is None:
                values = []
                for number, (name, part) in enumerate(unit.parts.items()):
                    value = self._find_part(unit, key, number)
                    values.append(part.prepare(self._read(name)) if value is None else value)
                found = self.pool[key] = unit.build(values)
            built[place] = found
        return built

    def _stored(self, name: str) -> str:
        return name if name in self.release.tensors else self.release.tied.get(name, name)

    def _key(self, unit: Unit) -> UnitKey:
        digests = [self.release.tensors[self._stored(name)].digest for name in unit.parts]
        return (unit.is_linear, tuple(unit.parts.values()), self.dtype), tuple(digests)

    def _find_part(self, unit: Unit, key: UnitKey, number: int) -> Tensor | None:
        """The prepared values of a part, taken from a unit in memory; None if there is none."""
        if unit.is_linear:
            resident = self.pool.find_with_part(key, number)
            if isinstance(resident, Linear):
                return unit.part_of(resident, number)
        # This is how a tied head finds the embedding.
        part, digest = key[0][1][number], key[1][number]
        plain = self.pool.get(((False, (Part(shape=part.shape),), self.dtype), (digest,)))
        return part.prepare(plain) if isinstance(plain, Tensor) else None

    def _read(self, name: str) -> Tensor:
        """Copy a tensor from its shard. Raises ReleaseError if the shard cannot be read, and
        StageError if the tensor has NaN or infinity, or if its digest is not that of the manifest.
        Raises StagingCancelled."""
        name = self._stored(name)
        entry = self.release.tensors[name]
        mapped = read_tensors(self.folder, {name: entry.file})[name]
        values = torch.empty(entry.shape, dtype=self.dtype)
        source, target = mapped.reshape(-1), values.view(-1)
        digest = blake3()
        for start in range(0, source.numel(), _BLOCK_ELEMENTS):
            if self.is_cancelled():
                raise StagingCancelled
            started = time.perf_counter()
            block = source[start : start + _BLOCK_ELEMENTS]
            if not is_finite(block):
                raise StageError(f"{entry.file}: tensor {name}: holds NaN or infinity")
            target[start : start + _BLOCK_ELEMENTS] = block
            digest.update(tensor_bytes(block))
            time.sleep(self.pause_share() * (time.perf_counter() - started))
        if (found := spelled_digest(digest)) != entry.digest:
            raise StageError(wrong_digest(entry.file, name, found=found, expected=entry.digest))
        self.read_bytes += mapped.nbytes
        return values


def _stack(blocks: list[Tensor]) -> Tensor:
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks)
