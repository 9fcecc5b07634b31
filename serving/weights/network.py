"""The network that `config.json` describes, and the stored tensors that each of its tensors is made
of.

Checkpoints on the Hub have other names than the networks of `transformers`: they lack the prefix of
the base model (GPT-2), have an older name of the head (GPT-NeoX), or one tensor for each expert
(Mixtral, Qwen3-MoE). `transformers.conversion_mapping` knows how these names lead to those of the
networks; this module asks it, and reads no tensor.
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from serving.errors import ReleaseError
from serving.weights.release import TensorEntry

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedConfig

CONFIG_FILE = "config.json"
Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """What one tensor of a network is made of."""

    names: tuple[str, ...]
    """Stored tensors, in the order in which `convert` takes them."""
    shapes: tuple[Shape, ...]
    """Of the stored tensors."""
    gaps: tuple[str, ...] = ()
    """Stored names that a list of tensors (one for each expert) lacks in its middle."""
    kind: str
    """Sources of one kind make equal tensors of equal stored ones."""
    convert: "Callable[[list[Tensor]], Tensor]"


@dataclass(frozen=True, kw_only=True, slots=True)
class Sources:
    by_tensor: dict[str, Source]
    """Name in the network → what it is made of. Names that are tied have the same source."""
    ties: dict[str, str]
    """Stored name → stored name of which it is a second copy, as the network has one tensor for
    both."""
    ignored: frozenset[str]
    """Stored names of buffers that the network computes itself."""


def load_config(folder: Path) -> "PreTrainedConfig":
    """The configuration with all defaults of its architecture. No code of the folder runs.

    Raises ReleaseError.
    """
    from transformers import AutoConfig

    path = folder / CONFIG_FILE
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    # Configurations check their own values, and raise what they like.
    except Exception as error:
        raise ReleaseError(f"{path}: transformers cannot read it: {error}") from error


def context_length(config: "PreTrainedConfig") -> int:
    """Tokens of a sequence at most. Networks without a limit (Bloom, whose ALiBi has none) get one
    that memory has room for."""
    return int(getattr(config.get_text_config(), "max_position_embeddings", 8192))


def build_network(folder: Path, *, is_empty: bool = False) -> "nn.Module":
    """The network without its weights; with `is_empty` its tensors take no memory, and only have
    shapes. Raises ReleaseError where `transformers` has no such network for generation.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    config = load_config(folder)
    if str(next(iter(config.architectures or ()), "")).endswith("ForMaskedLM"):
        # `transformers` would take it for a decoder.
        raise ReleaseError(f"{folder / CONFIG_FILE}: {config.architectures[0]} generates no text")
    try:
        with no_init_weights(), torch.device("meta") if is_empty else nullcontext():
            network: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
            network.tie_weights()
    except Exception as error:
        raise ReleaseError(
            f"{folder / CONFIG_FILE}: transformers cannot build a network that generates text: "
            f"{error}"
        ) from error
    built: nn.Module = network.eval()
    return built


def sources(network: "nn.Module", stored: Mapping[str, TensorEntry]) -> Sources:
    """`stored` are the tensors of a checkpoint.

    Raises ReleaseError with every stored tensor that leads nowhere, and every tensor of the network
    to which none leads or which would get another shape.
    """
    tensors: dict[str, Tensor] = network.state_dict(keep_vars=True)
    found = _Names(network).sources(stored)
    reasons: list[str] = []
    by_tensor: dict[str, Source] = {}
    ties: dict[str, str] = {}
    missing: list[str] = []
    for names in _tied(tensors):
        leading = [name for name in names if name in found]
        if not leading:
            missing += names[:1]
            continue
        source, shape = found[leading[0]], tuple(tensors[leading[0]].shape)
        by_tensor |= dict.fromkeys(names, source)
        for other in leading[1:]:
            ties |= dict(zip(found[other].names, source.names, strict=False))
        made = _made_shape(source)
        if isinstance(made, str) or made != shape:
            missing += [leading[0]]
            reasons.append(
                f"{stored[source.names[0]].file}: tensor {', '.join(source.names[:4])}: "
                + (made if isinstance(made, str) else f"has shape {list(made)}, ")
                + f"{CONFIG_FILE} asks for {list(shape)}"
            )
    used = {name for source in by_tensor.values() for name in source.names} | set(ties)
    surplus = sorted(set(stored) - used)
    ignored = frozenset(name for name in surplus if _is_ignored(network, name))
    absent = {name for name in _stored_names(network, missing) if name not in stored}
    absent |= {name for source in by_tensor.values() for name in source.gaps}
    reasons += [f"tensor {name}: in no shard of the release" for name in sorted(absent)]
    reasons += [
        f"{stored[name].file}: tensor {name}: the network of {CONFIG_FILE} has no such tensor"
        for name in surplus
        if name not in ignored
    ]
    if reasons:
        raise ReleaseError(*reasons)
    return Sources(by_tensor=by_tensor, ties=ties, ignored=ignored)


def hub_state_dict(network: Any, tensors: "Mapping[str, Tensor]") -> "dict[str, Tensor]":
    """`tensors`, named as in the network, under the names and in the shapes of the Hub."""
    from transformers.core_model_loading import revert_weight_conversion

    stored: dict[str, Tensor] = revert_weight_conversion(network, dict(tensors))
    return stored


class _Names:
    """How stored names lead to those of one network."""

    def __init__(self, network: "nn.Module") -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        self._network: Any = network
        self._tensors = network.state_dict()
        transforms = get_model_conversion_mapping(self._network)
        self._renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
        self._converters = [each for each in transforms if isinstance(each, WeightConverter)]
        self._by_pattern = {
            pattern: each for each in self._converters for pattern in each.source_patterns
        }

    def sources(self, stored: Mapping[str, TensorEntry]) -> dict[str, Source]:
        """By names in the network."""
        from transformers.core_model_loading import dot_natural_key

        found: dict[str, Source] = {}
        converted: dict[str, list[tuple[str, str]]] = {}
        # `transformers` goes through the names in this order, and its renamings rely on it.
        for name in sorted(stored, key=dot_natural_key):
            target, pattern = self.target(name)
            if pattern is not None and target in self._tensors:
                converted.setdefault(target, []).append((name, pattern))
            elif target in self._tensors:
                found[target] = _plain(name, stored[name].shape)
        for target, pairs in converted.items():
            found |= self._converted(target, pairs, stored)
        return found

    def target(self, name: str) -> tuple[str, str | None]:
        """The network's name, and the pattern of the conversion that leads there, if any."""
        from transformers.core_model_loading import rename_source_key

        prefix = self._network.base_model_prefix
        target, pattern = rename_source_key(
            name, self._renamings, self._converters, prefix, self._tensors
        )
        if target not in self._tensors and name in self._tensors:
            return name, None
        return target, pattern

    def _converted(
        self, target: str, pairs: list[tuple[str, str]], stored: Mapping[str, TensorEntry]
    ) -> dict[str, Source]:
        """A conversion may make several tensors, of which the first has the name `target`."""
        import torch

        converter = self._by_pattern[pairs[0][1]]
        names = tuple(name for name, _ in pairs)
        config = self._network.config

        def make(values: "Iterable[Tensor]") -> "dict[str, Tensor]":
            running = deepcopy(converter)
            for (name, pattern), tensor in zip(pairs, values, strict=True):
                running.add_tensor(target, name, pattern, tensor)
            made = running.convert(target, model=self._network, config=config)
            return {
                name: tensor[0] if isinstance(tensor, list) else tensor
                for name, tensor in made.items()
            }

        kind = f"{converter.operations} of {converter.source_patterns} in {_digest(config)}"
        empty = [torch.empty(stored[name].shape, device="meta") for name in names]
        try:
            results = list(make(empty))
        except (RuntimeError, ValueError, IndexError, KeyError):
            # `_made_shape` meets the same error, and says so.
            results = [target]
        return {
            result: Source(
                names=names,
                shapes=tuple(stored[name].shape for name in names),
                gaps=_gaps(pairs),
                kind=f"{kind}: {number}",
                convert=lambda values, result=result: make(values)[result],  # type: ignore[misc]
            )
            for number, result in enumerate(results)
        }


def _plain(name: str, shape: Shape) -> Source:
    return Source(names=(name,), shapes=(shape,), kind="plain", convert=lambda values: values[0])


def _gaps(pairs: list[tuple[str, str]]) -> tuple[str, ...]:
    """`transformers` puts lists together in the order of their numbers, whatever these are: without
    its second one, a list of experts would go on with the third."""
    found: list[str] = []
    numbers: dict[tuple[str, str], set[int]] = {}
    for name, pattern in pairs:
        place = re.search(pattern.replace("*.", r"(?P<number>\d+)\.", 1), name)
        if "*." in pattern and place is not None:
            around = name[: place.start("number")], name[place.end("number") :]
            numbers.setdefault(around, set()).add(int(place["number"]))
    for (before, after), present in numbers.items():
        found += [f"{before}{n}{after}" for n in range(max(present)) if n not in present]
    return tuple(found)


def _made_shape(source: Source) -> Shape | str:
    """The shape of what is made, or why it cannot be made."""
    import torch

    if source.kind == "plain":
        return source.shapes[0]
    try:
        made = source.convert([torch.empty(shape, device="meta") for shape in source.shapes])
    except (RuntimeError, ValueError, IndexError, KeyError) as error:
        return f"cannot be put together ({error}), "
    return tuple(made.shape)


def _tied(tensors: "Mapping[str, Tensor]") -> list[list[str]]:
    by_tensor: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        by_tensor.setdefault(id(tensor), []).append(name)
    return list(by_tensor.values())


def _stored_names(network: "nn.Module", names: list[str]) -> list[str]:
    """The names under which the Hub stores tensors of a network."""
    import torch

    if not names:
        return []
    tensors = network.state_dict()
    chosen = {name: torch.empty(tensors[name].shape, device="meta") for name in names}
    return sorted(hub_state_dict(network, chosen))


def _is_ignored(network: Any, name: str) -> bool:
    """Whether `transformers` would ignore the tensor: a buffer of older checkpoints."""
    patterns = set(network._keys_to_ignore_on_load_unexpected or ())
    for suffix, pattern in (
        ("rotary_emb.inv_freq", r"rotary_emb\.inv_freq"),
        ("position_ids", r"(^|\.)position_ids$"),
    ):
        if any(buffer.endswith(suffix) for buffer, _ in network.named_buffers()):
            patterns.add(pattern)
    return any(re.search(pattern, name) for pattern in patterns)


def _digest(config: Any) -> str:
    return hashlib.sha256(config.to_json_string().encode()).hexdigest()[:12]
