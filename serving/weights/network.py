"""Builds the network that `config.json` describes, and finds out how each tensor of the network is
made from stored tensors. This module does not read the content of tensors.

A *stored name* is the name of a tensor in a checkpoint. In the network of `transformers`, the
tensor may have another name. For example, stored names may lack the prefix of the base model
(GPT-2), or the checkpoint may use an older name for the head (GPT-NeoX). Some checkpoints store one
tensor for each expert (Mixtral, Qwen3-MoE), but the network has one tensor for all experts.
`transformers.conversion_mapping` defines how to get from stored names to the network's names.
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
    """Describes how one tensor of a network is made from stored tensors."""

    names: tuple[str, ...]
    """The names of the stored tensors, in the order in which `convert` takes the tensors."""
    shapes: tuple[Shape, ...]
    """The shapes of the stored tensors, in the same order."""
    missing_names: tuple[str, ...] = ()
    """The names of the stored tensors that a numbered list lacks. (A numbered list has one tensor
    for each expert, for example. It should have every number from 0 to its last number.)"""
    kind: str
    """A name for what `convert` does: two sources of the same kind make equal tensors from equal
    stored tensors."""
    convert: "Callable[[list[Tensor]], Tensor]"
    """Makes the tensor of the network from the stored tensors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sources:
    by_tensor: dict[str, Source]
    """Name in the network → how this tensor is made. If the network has several names for one
    tensor (tied tensors), these names have the same source."""
    ties: dict[str, str]
    """Stored name of an unused copy → stored name of the used copy. A checkpoint may store copies
    of one tensor of the network under different names. Only one copy is used: the copy whose name
    comes first in the network."""
    ignored: frozenset[str]
    """The names of stored tensors that `transformers` does not load into the network. Most of them
    are buffers that the network computes itself."""


def load_config(folder: Path) -> "PreTrainedConfig":
    """The configuration in `config.json`. If the file lacks a value, the configuration contains the
    architecture's default. No code from the folder runs.

    Raises ReleaseError if transformers cannot read the file.
    """
    from transformers import AutoConfig

    path = folder / CONFIG_FILE
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    # Each configuration class checks its own values, and may raise any exception.
    except Exception as error:
        raise ReleaseError(f"{path}: transformers cannot read it: {error}") from error


def context_length(config: "PreTrainedConfig") -> int:
    """The largest number of tokens in a sequence. Some networks have no limit, for example Bloom,
    which uses ALiBi (arXiv:2108.12409). For such a network, the result is 8192, so that the keys
    and values of a sequence fit into memory."""
    return int(getattr(config.get_text_config(), "max_position_embeddings", 8192))


def build_network(folder: Path, *, is_empty: bool = False) -> "nn.Module":
    """The network, without the weights of the checkpoint. With `is_empty`, the network's tensors
    have shapes but no content, so they take no memory. Raises ReleaseError if `transformers` cannot
    build a network from this config, or if the network would not generate text.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    config = load_config(folder)
    if str(next(iter(config.architectures or ()), "")).endswith("ForMaskedLM"):
        # A masked language model, such as BERT, generates no text. But `AutoModelForCausalLM` would
        # use its config to build a different network, which does generate text.
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
    """How each tensor of the network is made from `stored`, the tensors of a checkpoint.

    Raises ReleaseError if the stored tensors do not fit the network. The error names every stored
    tensor that the network does not use, every tensor that the checkpoint lacks, and every tensor
    that has the wrong shape.
    """
    tensors: dict[str, Tensor] = network.state_dict(keep_vars=True)
    found = _NameConversions(network).sources(stored)
    reasons: list[str] = []
    by_tensor: dict[str, Source] = {}
    ties: dict[str, str] = {}
    missing: list[str] = []
    for names in _names_by_tensor(tensors):
        with_source = [name for name in names if name in found]
        if not with_source:
            missing += names[:1]
            continue
        first = with_source[0]
        source, shape = found[first], tuple(tensors[first].shape)
        by_tensor |= dict.fromkeys(names, source)
        for other in with_source[1:]:
            ties |= dict(zip(found[other].names, source.names, strict=False))
        result = _result_shape(source)
        if isinstance(result, str) or result != shape:
            # The shape may be wrong because stored tensors are missing, such as the tensors of the
            # last experts. So also report the tensors that are missing.
            missing.append(first)
            some = ", ".join(source.names[:4]) + ", …" * (len(source.names) > 4)
            fault = result if isinstance(result, str) else f"has shape {list(result)}"
            reasons.append(
                f"{stored[source.names[0]].file}: the tensor that is made from {some} {fault}, "
                f"but {CONFIG_FILE} asks for {list(shape)}"
            )
    used = {name for source in by_tensor.values() for name in source.names} | set(ties)
    surplus = sorted(set(stored) - used)
    ignored = frozenset(name for name in surplus if _is_ignored(network, name))
    absent = {name for name in _stored_names(network, missing) if name not in stored}
    absent |= {name for source in by_tensor.values() for name in source.missing_names}
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
    """Converts tensors of the network to the names and shapes that checkpoints on the Hub have. The
    keys of `tensors` are the network's names."""
    from transformers.core_model_loading import revert_weight_conversion

    stored: dict[str, Tensor] = revert_weight_conversion(network, dict(tensors))
    return stored


class _NameConversions:
    """Finds the network's name for each stored name, as `transformers` does when it loads a
    checkpoint."""

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
        """Name in the network → how this tensor is made. A stored tensor for which the network has
        no tensor is left out."""
        from transformers.core_model_loading import dot_natural_key

        found: dict[str, Source] = {}
        converted: dict[str, list[tuple[str, str]]] = {}
        # Use the order in which `transformers` goes through the names, because some of its
        # renamings depend on this order.
        for name in sorted(stored, key=dot_natural_key):
            target, pattern = self._target(name)
            if pattern is not None and target in self._tensors:
                converted.setdefault(target, []).append((name, pattern))
            elif target in self._tensors:
                found[target] = Source(
                    names=(name,),
                    shapes=(stored[name].shape,),
                    kind="plain",
                    convert=lambda values: values[0],
                )
        for target, pairs in converted.items():
            found |= self._converted_sources(target, pairs, stored)
        return found

    def _target(self, name: str) -> tuple[str, str | None]:
        """The network's name for a stored name, and the pattern of the conversion that matches the
        stored name. The pattern is None if the stored tensor needs no conversion."""
        from transformers.core_model_loading import rename_source_key

        prefix = self._network.base_model_prefix
        target, pattern = rename_source_key(
            name, self._renamings, self._converters, prefix, self._tensors
        )
        if target not in self._tensors and name in self._tensors:
            # The checkpoint already uses the names of the network.
            return name, None
        return target, pattern

    def _converted_sources(
        self, target: str, pairs: list[tuple[str, str]], stored: Mapping[str, TensorEntry]
    ) -> dict[str, Source]:
        """The sources of the tensors that one conversion makes. A conversion may make several
        tensors; the first one has the name `target`. `pairs` are the stored names that the
        conversion takes, each with the pattern that matches it."""
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

        digest = hashlib.sha256(config.to_json_string().encode()).hexdigest()[:12]
        kind = f"{converter.operations} of {converter.source_patterns} in {digest}"
        empty = [torch.empty(stored[name].shape, device="meta") for name in names]
        try:
            results = list(make(empty))
        except (RuntimeError, ValueError, IndexError, KeyError):
            # `_result_shape` will get the same error, and will report it.
            results = [target]
        return {
            result: Source(
                names=names,
                shapes=tuple(stored[name].shape for name in names),
                missing_names=_missing_members(pairs),
                kind=f"{kind}: {number}",
                convert=lambda values, result=result: make(values)[result],  # type: ignore[misc]
            )
            for number, result in enumerate(results)
        }


def _missing_members(pairs: list[tuple[str, str]]) -> tuple[str, ...]:
    """The stored names that are missing from a numbered list, such as the tensors of the experts.

    `transformers` sorts such a list by its numbers, and does not check that the numbers are
    complete. If the tensor of expert 1 were missing, the tensor of expert 2 would take its place.
    """
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


def _result_shape(source: Source) -> Shape | str:
    """The shape of the tensor that `source` makes. If the tensor cannot be made, the result is a
    text that says why."""
    import torch

    if source.kind == "plain":
        return source.shapes[0]
    try:
        made = source.convert([torch.empty(shape, device="meta") for shape in source.shapes])
    except (RuntimeError, ValueError, IndexError, KeyError) as error:
        return f"cannot be put together ({error})"
    return tuple(made.shape)


def _names_by_tensor(tensors: "Mapping[str, Tensor]") -> list[list[str]]:
    """For each tensor object, the list of its names. Tied tensors have several names."""
    by_tensor: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        by_tensor.setdefault(id(tensor), []).append(name)
    return list(by_tensor.values())


def _stored_names(network: "nn.Module", names: list[str]) -> list[str]:
    """The names under which checkpoints on the Hub store these tensors of the network."""
    import torch

    if not names:
        return []
    tensors = network.state_dict()
    chosen = {name: torch.empty(tensors[name].shape, device="meta") for name in names}
    return sorted(hub_state_dict(network, chosen))


def _is_ignored(network: Any, name: str) -> bool:
    """Whether `transformers` ignores the stored tensor `name`, for example because it is a buffer
    that only older checkpoints store."""
    patterns = set(network._keys_to_ignore_on_load_unexpected or ())
    for suffix, pattern in (
        ("rotary_emb.inv_freq", r"rotary_emb\.inv_freq"),
        ("position_ids", r"(^|\.)position_ids$"),
    ):
        if any(buffer.endswith(suffix) for buffer, _ in network.named_buffers()):
            patterns.add(pattern)
    return any(re.search(pattern, name) for pattern in patterns)
