"""Loads a release: finds in `config.json` which network runs it, reads the shards, builds the units
of the network and makes its runner. A unit is a piece of a network. Units that another release in
memory already has are shared. The work is done on a thread with low priority."""

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
from blake3 import blake3
from torch import Tensor

from serving.engines.settings import TorchEngineSettings
from serving.engines.torch_engine.llama import Linear, LlamaRunner, LlamaShape
from serving.engines.torch_engine.slots import (
    KeyValueSlots,
    KvCacheSize,
    LayerShape,
    Runner,
    page_table_bytes,
    plan_cache,
)
from serving.errors import ReleaseError
from serving.weights import network
from serving.weights.release import Release, read_json, spelled_digest
from serving.weights.shards import (
    free_bytes,
    is_finite,
    read_tensors,
    tensor_bytes,
    yield_to_other_threads,
)
from serving.weights.verify import wrong_digest

_log = logging.getLogger(__name__)

# The number of elements that are processed at once. This takes some milliseconds, short enough that
# no other thread waits long for the core.
_BLOCK_ELEMENTS = 1 << 20

Built = Linear | Tensor
UnitKey = tuple[bool, tuple["Part", ...], torch.dtype, tuple[str, ...]]
"""Equal for equal units: the form of the unit, and the digests of its stored tensors."""
UnitPool = WeakValueDictionary[UnitKey, Built]
"""The units of all releases in memory. The pool holds weak references only, so a unit is freed
together with the last release that uses it."""


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


class StagingCancelled(Exception):
    """The load was cancelled, because the release is no longer wanted."""


@dataclass(kw_only=True, slots=True)
class Loader:
    """Loads one release."""

    release: Release
    folder: Path
    pool: UnitPool
    settings: TorchEngineSettings
    dtype: torch.dtype
    promised_bytes: int
    """Free memory that other releases may still take."""
    is_cancelled: Callable[[], bool]
    pause_share: Callable[[], float]
    """Seconds to pause for each second of work. The pauses leave memory bandwidth to running
    requests."""
    read_bytes: int = 0
    """Bytes of the tensors that were read from shards."""

    def check(self, units: Mapping[str, Unit]) -> None:
        """Raises ReleaseError with every tensor in which the manifest does not fit the network. No
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
            raise ReleaseError(*reasons)

    def missing_bytes(self, units: Mapping[str, Unit]) -> int:
        """The memory that the new units will take. Memory that is freed during `load` does not
        count."""
        fresh = {self._key(unit): unit.numel for unit in units.values()}
        return sum(
            numel * self.dtype.itemsize for key, numel in fresh.items() if key not in self.pool
        )

    def load(self, units: Mapping[str, Unit]) -> dict[str, Built]:
        """Build all units. Raises ReleaseError and StagingCancelled."""
        built: dict[str, Built] = {}
        for place, unit in units.items():
            key = self._key(unit)
            found = self.pool.get(key)
            if found is None:
                values = [self._prepared(name, part) for name, part in unit.parts.items()]
                found = self.pool[key] = unit.build(values)
            built[place] = found
        return built

    def _stored(self, name: str) -> str:
        return name if name in self.release.tensors else self.release.tied.get(name, name)

    def _key(self, unit: Unit) -> UnitKey:
        digests = [self.release.tensors[self._stored(name)].digest for name in unit.parts]
        return unit.is_linear, tuple(unit.parts.values()), self.dtype, tuple(digests)

    def _prepared(self, name: str, part: Part) -> Tensor:
        """The prepared values of a part. They are read, unless a unit in memory has this tensor as
        it is stored: a tied head finds the embedding."""
        plain = self.pool.get(self._key(Unit(parts={name: Part(shape=part.shape)})))
        return part.prepare(plain if isinstance(plain, Tensor) else self._read(name))

    def _read(self, name: str) -> Tensor:
        """Copy a tensor from its shard. Raises ReleaseError if the shard cannot be read, if the
        tensor has NaN or infinity, or if its digest is not that of the manifest. Raises
        StagingCancelled."""
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
                raise ReleaseError(f"{entry.file}: tensor {name}: holds NaN or infinity")
            target[start : start + _BLOCK_ELEMENTS] = block
            digest.update(tensor_bytes(block))
            time.sleep(self.pause_share() * (time.perf_counter() - started))
        if (found := spelled_digest(digest)) != entry.digest:
            raise ReleaseError(wrong_digest(entry.file, name, found=found, expected=entry.digest))
        self.read_bytes += mapped.nbytes
        return values


def _stack(blocks: list[Tensor]) -> Tensor:
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks)


_CONFIG_KEYS = {
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "rms_norm_eps",
    "vocab_size",
}
_LLAMA_LIKE = {
    "LlamaForCausalLM": _CONFIG_KEYS,
    "MistralForCausalLM": _CONFIG_KEYS | {"sliding_window"},
    "Qwen2ForCausalLM": _CONFIG_KEYS,
    "Qwen3ForCausalLM": _CONFIG_KEYS | {"head_dim"},
}
"""Architecture → the settings that `config.json` must have. The others have the same default in
each of these architectures."""
_ROPE_TYPES = ("default", "linear", "llama3")


def read_config(folder: Path) -> dict[str, Any]:
    """The content of `config.json`. Raises ReleaseError if it cannot be read, or if it describes
    quantised weights."""
    path = folder / network.CONFIG_FILE
    config = read_json(path)
    if config.get("quantization_config") is not None:
        raise ReleaseError(f"{path}: quantised weights are not supported; publish plain ones")
    return config


def llama_shape(config: dict[str, Any]) -> LlamaShape | None:
    """The shape of the network; None if `llama.py` computes something else than this network, or if
    the config leaves out a setting. Then `transformers` runs it."""
    name = next(iter(config.get("architectures") or ()), None)
    if name not in _LLAMA_LIKE or not config.keys() >= _LLAMA_LIKE[name]:
        return None
    rope = rope_parameters(config)
    uses_window = config.get("use_sliding_window", name == "MistralForCausalLM")
    window = config.get("sliding_window") if uses_window else None
    if (
        config.get("hidden_act", "silu") != "silu"
        or rope["rope_type"] not in _ROPE_TYPES
        or rope.get("partial_rotary_factor", 1.0) != 1.0
        or (window is not None and window < config["max_position_embeddings"])
        or any(kind != "full_attention" for kind in config.get("layer_types") or ())
    ):
        return None
    num_heads = config["num_attention_heads"]
    has_bias = bool(config.get("attention_bias", False))
    return LlamaShape(
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=config["num_key_value_heads"] or num_heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // num_heads,
        context=config["max_position_embeddings"],
        norm_eps=config["rms_norm_eps"],
        qkv_bias=has_bias or name == "Qwen2ForCausalLM",
        output_bias=has_bias and name != "Qwen2ForCausalLM",
        mlp_bias=bool(config.get("mlp_bias", False)),
        has_head_norms=name == "Qwen3ForCausalLM",
        rope=rope,
    )


def llama_units(shape: LlamaShape) -> dict[str, Unit]:
    """All units of the network. The keys are their names in `LlamaRunner`."""
    vocabulary = Part(shape=(shape.vocab_size, shape.hidden_size))
    found = {
        "embedding": Unit(parts={"model.embed_tokens.weight": vocabulary}),
        "norm": _norm("model.norm", shape.hidden_size),
        "head": _linear({"lm_head": vocabulary}),
    }
    for layer in range(shape.num_layers):
        found.update(_layer_units(shape, layer))
    return found


def _layer_units(shape: LlamaShape, layer: int) -> dict[str, Unit]:
    at = f"model.layers.{layer}."
    hidden, inner, head_dim = shape.hidden_size, shape.intermediate_size, shape.head_dim
    queries, keys = shape.num_heads * head_dim, shape.num_kv_heads * head_dim
    to_inner = Part(shape=(inner, hidden))
    found = {
        "input_norm": _norm(f"{at}input_layernorm", hidden),
        "mlp_norm": _norm(f"{at}post_attention_layernorm", hidden),
        "qkv": _linear(
            {
                f"{at}self_attn.q_proj": Part(shape=(queries, hidden), rotated_head_dim=head_dim),
                f"{at}self_attn.k_proj": Part(shape=(keys, hidden), rotated_head_dim=head_dim),
                f"{at}self_attn.v_proj": Part(shape=(keys, hidden)),
            },
            has_bias=shape.qkv_bias,
        ),
        "output": _linear(
            {f"{at}self_attn.o_proj": Part(shape=(hidden, queries))}, has_bias=shape.output_bias
        ),
        "gate_up": _linear(
            {f"{at}mlp.gate_proj": to_inner, f"{at}mlp.up_proj": to_inner}, has_bias=shape.mlp_bias
        ),
        "down": _linear(
            {f"{at}mlp.down_proj": Part(shape=(hidden, inner))}, has_bias=shape.mlp_bias
        ),
    }
    if shape.has_head_norms:
        for name, norm in (("query_norm", "q_norm"), ("key_norm", "k_norm")):
            found[name] = _norm(f"{at}self_attn.{norm}", head_dim, rotated_head_dim=head_dim)
    return {f"{layer}.{name}": unit for name, unit in found.items()}


def _norm(module: str, size: int, *, rotated_head_dim: int | None = None) -> Unit:
    """A norm's weight, in float32 whatever the dtype of the network is."""
    part = Part(shape=(size,), rotated_head_dim=rotated_head_dim, is_float32=True)
    return Unit(parts={f"{module}.weight": part})


def _linear(weights: dict[str, Part], *, has_bias: bool = False) -> Unit:
    """A unit with the weights of several modules. A bias has the form of its weight."""
    parts = {f"{module}.weight": part for module, part in weights.items()}
    if has_bias:
        for module, part in weights.items():
            parts[f"{module}.bias"] = replace(part, shape=part.shape[:1])
    return Unit(parts=parts, is_linear=True)


def rope_parameters(config: dict[str, Any]) -> dict[str, Any]:
    """The RoPE settings of a configuration. `config.json` has an older and a newer spelling; the
    result has the newer one."""
    parameters = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    parameters.setdefault("rope_type", parameters.pop("type", "default"))
    parameters.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    parameters.setdefault("original_max_position_embeddings", config["max_position_embeddings"])
    return parameters


def load_runner(loader: Loader) -> Runner:
    """Load a release and make its runner. Blocks, and lowers the priority of the calling thread.

    The manifest and the free memory are checked before any tensor is read, and the KV cache gets
    its address range. Raises ReleaseError and StagingCancelled.
    """
    lower_thread_priority()
    started = time.perf_counter()
    shape = llama_shape(read_config(loader.folder))
    with torch.inference_mode():
        runner = _load_generic(loader) if shape is None else _load_llama(shape, loader)
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
    if llama_shape(read_config(folder)) is None:
        from serving.engines.torch_engine import generic

        generic.layer_shapes(folder)


def _load_llama(shape: LlamaShape, loader: Loader) -> Runner:
    units = llama_units(shape)
    loader.check(units)
    layer = LayerShape(
        num_heads=shape.num_kv_heads, key_size=shape.head_dim, value_size=shape.head_dim
    )
    slots, cache_size = _make_slots(loader, units, shape.context, [layer] * shape.num_layers)
    return LlamaRunner(shape, loader.load(units), slots, cache_size)


def _load_generic(loader: Loader) -> Runner:
    from serving.engines.torch_engine import generic

    units = {
        name: Unit(parts={name: Part(shape=entry.shape)})
        for name, entry in loader.release.tensors.items()
    }
    layers = generic.layer_shapes(loader.folder)
    built: Any = network.build_network(loader.folder, loader.dtype)
    context = generic.allowed_context(built.config)
    slots, cache_size = _make_slots(loader, units, context, layers)
    tensors: dict[str, Any] = loader.load(units)
    tied = {alias: tensors[name] for alias, name in loader.release.tied.items()}
    network.load_weights(built, tensors | tied)
    runner = generic.TransformersRunner(built, slots, cache_size)
    # The parameters use the memory of the stored tensors, and the pool holds these weakly.
    used = {each.data_ptr() for each in built.state_dict().values()}
    runner.stored = [each for each in tensors.values() if each.data_ptr() in used]
    return runner


def _make_slots(
    loader: Loader, units: Mapping[str, Unit], allowed: int, layers: Sequence[LayerShape]
) -> tuple[list[KeyValueSlots], KvCacheSize]:
    """The slots of each layer of a network that allows a context of `allowed` tokens. They are made
    before the weights are loaded, so that a refusal of the system comes early.

    Raises ReleaseError if there is too little memory for them and the weights.
    """
    settings, dtype = loader.settings, loader.dtype
    cache_size = plan_cache(settings, allowed, layers, dtype)
    weight_bytes = loader.missing_bytes(units)
    kv_bytes = cache_size.num_blocks * cache_size.block_bytes + sum(
        page_table_bytes(
            layer.num_heads,
            cache_size.num_slots,
            cache_size.slot_tokens * layer.head_dim * dtype.itemsize,
        )
        for layer in layers
    )
    free = free_bytes()
    needed = weight_bytes + kv_bytes + settings.memory_reserve_bytes
    if free is not None and needed > free - loader.promised_bytes:
        raise ReleaseError(
            f"too little memory: {loader.release.id} needs {weight_bytes} bytes "
            f"for weights and {kv_bytes} for keys and values, with "
            f"{settings.memory_reserve_bytes} to spare; {free} are free, of which other releases "
            f"may still take {loader.promised_bytes}. "
            "Lower max_batch, max_context or kv_cache_bytes under [serving.torch]"
        )
    try:
        slots = [
            KeyValueSlots(
                layer,
                num_slots=cache_size.num_slots,
                num_tokens=cache_size.slot_tokens,
                dtype=dtype,
            )
            for layer in layers
        ]
    except OSError as error:
        raise ReleaseError(
            f"{cache_size.num_slots} slots of {cache_size.context} tokens: the system does not "
            f"provide their address range ({error}); lower max_batch or max_context under "
            "[serving.torch], or raise the limit of virtual memory (ulimit -v)"
        ) from error
    return slots, cache_size


def lower_thread_priority() -> None:
    """Make the calling thread use one core only, and little of it while the step loop computes."""
    num_threads = torch.get_num_threads()
    if num_threads > 1:
        torch.set_num_threads(1)
        # The call above sets two numbers: the one of this thread, and the default of threads that
        # start later. Another thread restores the default.
        other = threading.Thread(target=torch.set_num_threads, args=(num_threads,))
        other.start()
        other.join()
    yield_to_other_threads()
