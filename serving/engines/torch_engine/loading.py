"""Reads the shards of a release and builds units: checks, converts and fuses the tensors. A unit is
a piece of a network. Units that another release in memory already has are shared."""

import math
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from serving.engine import StageError
from serving.engines.torch_engine import rope
from serving.engines.torch_engine.linear import Linear
from serving.weights.release import Release, TensorDigest, TensorEntry
from serving.weights.shards import DTYPES, read_tensors, tensor_bytes
from serving.weights.verify import wrong_digest

# The number of elements that are processed at once. This takes some milliseconds, short enough that
# no other thread waits long for the core.
_BLOCK_ELEMENTS = 1 << 20

Built = Linear | Tensor
PartForm = tuple[tuple[int, ...], int | None, bool]
Form = tuple[str, tuple[PartForm, ...]]
UnitKey = tuple[Form, torch.dtype, tuple[str, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A stored tensor that a unit is built from, and the form in which the unit holds it."""

    name: str
    shape: tuple[int, ...]
    rotated_head_dim: int | None = None
    """If this is set, the rows of each head of this size get the order of `rope.interleave`."""
    is_float32: bool = False
    """Whether the values are held in float32, whatever the dtype of the network is."""

    @property
    def form(self) -> PartForm:
        return self.shape, self.rotated_head_dim, self.is_float32

    def prepare(self, values: Tensor) -> Tensor:
        """Converts the stored values to the form in which the unit holds them."""
        if self.rotated_head_dim is not None:
            order = rope.interleave(len(values) // self.rotated_head_dim, self.rotated_head_dim)
            values = values[order.to(values.device)]
        return values.float() if self.is_float32 else values


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """Two units with the same form and equal digests of their parts are equal. Releases in memory
    share such units."""

    kind: str
    """A name for what `build` does."""
    parts: tuple[Part, ...]
    build: Callable[[list[Tensor]], Built]
    """Builds the unit. The argument has the prepared values of all parts in order, on the final
    device. The unit may keep their memory."""

    @property
    def form(self) -> Form:
        return self.kind, tuple(part.form for part in self.parts)

    @property
    def numel(self) -> int:
        return sum(math.prod(part.shape) for part in self.parts)

    def extract_part(self, built: Linear, number: int) -> Tensor:
        """The prepared values of one part, taken from a `Linear` of the same form: some rows of the
        weight, or of the bias if the part has one dimension."""
        shapes = [part.shape for part in self.parts]
        rows = [shape[0] for shape in shapes[:number] if len(shape) == len(shapes[number])]
        whole = built.bias if len(shapes[number]) == 1 else built.plain_weight()
        assert whole is not None
        return whole[sum(rows) : sum(rows) + shapes[number][0]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    units: dict[str, Built]
    read_bytes: int
    """Bytes of the tensors that were read from shards."""


class UnitPool(WeakValueDictionary[UnitKey, Built]):
    """The units of all releases in memory. The pool holds weak references only, so a unit is freed
    together with the last release that uses it."""

    def find_with_part(self, key: UnitKey, number: int) -> Built | None:
        """A unit of the same form and dtype, whose part with this number has the same digest."""
        form, dtype, digests = key
        for (*like, others), unit in self.items():
            if like == [form, dtype] and others[number] == digests[number]:
                return unit
        return None


class StagingCancelled(Exception):
    """The load was cancelled, because the release is no longer wanted or the engine closes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Loader:
    """Loads one release."""

    release: Release
    folder: Path
    pool: UnitPool
    dtype: torch.dtype
    device: torch.device
    is_cancelled: Callable[[], bool]
    pause_share: Callable[[], float]
    """Seconds to pause for each second of work. The pauses leave memory bandwidth to running
    requests."""

    def check(
        self,
        units: Mapping[str, Unit],
        ties: Mapping[str, str],
        ignored: Collection[str] = frozenset(),
    ) -> None:
        """Raises StageError with every tensor in which the manifest does not fit the network.

        `ties` maps an alias to the name that the network uses instead. A release may store both if
        they are equal. Tensors in `ignored` may be stored but are not used. No shard is read.
        """
        entries = self.release.tensors
        reasons = []
        needed: set[str] = set()
        for part in _parts(units):
            name = self._stored(part.name)
            needed.add(name)
            entry = entries.get(name)
            if entry is None:
                reasons.append(f"tensor {part.name}: in no shard of the release")
            elif entry.shape != part.shape:
                reasons.append(
                    f"{entry.file}: tensor {name}: has shape {list(entry.shape)}, "
                    f"config.json asks for {list(part.shape)}"
                )
            elif entry.dtype not in ("F32", "F16", "BF16", "F64"):
                reasons.append(
                    f"{entry.file}: tensor {name}: has dtype {entry.dtype}, "
                    "the network computes with floating-point numbers"
                )
        for name in sorted(set(entries) - needed):
            entry, tied = entries[name], entries.get(ties.get(name, ""))
            if name in ignored:
                continue
            if tied is None:
                reasons.append(
                    f"{entry.file}: tensor {name}: the network of config.json has no such tensor"
                )
            elif _content(entry) != _content(tied):
                reasons.append(
                    f"{entry.file}: tensor {name}: differs from {ties[name]}, though config.json "
                    "ties them"
                )
        if reasons:
            raise StageError(*dict.fromkeys(reasons))

    def missing_bytes(self, units: Mapping[str, Unit]) -> int:
        """The memory that the new units will take. Memory that is freed during `load` does not
        count."""
        fresh = {self._key(unit): unit.numel for unit in units.values()}
        return sum(
            numel * self.dtype.itemsize for key, numel in fresh.items() if key not in self.pool
        )

    def load(self, units: Mapping[str, Unit]) -> Loaded:
        """Build all units. Raises ReleaseError, StageError and StagingCancelled."""
        built: dict[str, Built] = {}
        read: set[str] = set()
        for place, unit in units.items():
            key = self._key(unit)
            found = self.pool.get(key)
            if found is None:
                values = [self._find_part(unit, key, number) for number in range(len(unit.parts))]
                for number, part in enumerate(unit.parts):
                    if values[number] is None:
                        values[number] = part.prepare(self._read(part))
                        read.add(self._stored(part.name))
                found = unit.build([each for each in values if each is not None])
                self.pool[key] = found
            built[place] = found
        sizes = {spelled: dtype.itemsize for dtype, spelled in DTYPES.items()}
        entries = [self.release.tensors[name] for name in read]
        num_bytes = sum(math.prod(entry.shape) * sizes[entry.dtype] for entry in entries)
        return Loaded(units=built, read_bytes=num_bytes)

    def _stored(self, name: str) -> str:
        return name if name in self.release.tensors else self.release.tied.get(name, name)

    def _key(self, unit: Unit) -> UnitKey:
        digests = [self.release.tensors[self._stored(part.name)].digest for part in unit.parts]
        return unit.form, self.dtype, tuple(digests)

    def _find_part(self, unit: Unit, key: UnitKey, number: int) -> Tensor | None:
        """The prepared values of a part, taken from a unit in memory; None if there is none."""
        if unit.kind == "linear":
            resident = self.pool.find_with_part(key, number)
            if isinstance(resident, Linear):
                return unit.extract_part(resident, number)
        # This is how a tied head finds the embedding.
        part, digest = unit.parts[number], key[2][number]
        as_stored = Part(name=part.name, shape=part.shape).form
        plain = self.pool.get((("plain", (as_stored,)), self.dtype, (digest,)))
        return part.prepare(plain) if isinstance(plain, Tensor) else None

    def _read(self, part: Part) -> Tensor:
        """Copy a tensor from its shard. Raises ReleaseError if the shard cannot be read, and
        StageError if the tensor has NaN or infinity, or if its digest is not that of the manifest.
        Raises StagingCancelled."""
        name = self._stored(part.name)
        entry = self.release.tensors[name]
        mapped = read_tensors(self.folder, {name: entry.file})[name]
        if tuple(mapped.shape) != entry.shape or DTYPES[mapped.dtype] != entry.dtype:
            raise StageError(
                f"{entry.file}: tensor {name}: is {DTYPES[mapped.dtype]} {list(mapped.shape)}, "
                f"release.json says {entry.dtype} {list(entry.shape)}"
            )
        values = torch.empty(part.shape, dtype=self.dtype, device=self.device)
        source, target = mapped.reshape(-1), values.view(-1)
        digest = TensorDigest()
        for start in range(0, source.numel(), _BLOCK_ELEMENTS):
            if self.is_cancelled():
                raise StagingCancelled
            started = time.perf_counter()
            block = source[start : start + _BLOCK_ELEMENTS]
            low, high = torch.aminmax(block)
            # If the block contains a NaN, both are NaN.
            if not (low.isfinite() and high.isfinite()):
                raise StageError(f"{entry.file}: tensor {name}: holds NaN or infinity")
            target[start : start + _BLOCK_ELEMENTS] = block
            digest.update(tensor_bytes(block))
            time.sleep(self.pause_share() * (time.perf_counter() - started))
        if (found := str(digest)) != entry.digest:
            raise StageError(wrong_digest(entry.file, name, found=found, expected=entry.digest))
        return values


def _content(entry: TensorEntry) -> tuple[str, tuple[int, ...], str]:
    return entry.dtype, entry.shape, entry.digest


def _parts(units: Mapping[str, Unit]) -> list[Part]:
    return [part for unit in units.values() for part in unit.parts]
