"""Builds the network that `config.json` describes, and gives it stored tensors.

A *stored name* is the name of a tensor in a checkpoint. In the network of `transformers`, the
tensor may have another name. For example, stored names may lack the prefix of the base model
(GPT-2), or the checkpoint may use an older name for the head (GPT-NeoX). Some checkpoints store one
tensor for each expert (Mixtral, Qwen3-MoE), but the network has one tensor for all experts.
`transformers` knows how to get from stored names to the network's names.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from serving.errors import ReleaseError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from transformers import PreTrainedConfig

CONFIG_FILE = "config.json"


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


def build_network(
    folder: Path, dtype: "torch.dtype | None" = None, *, is_empty: bool = False
) -> "nn.Module":
    """The network, without the weights of the checkpoint, by default in float32. With `is_empty`,
    the network's tensors have shapes but no content, so they take no memory. Raises ReleaseError if
    `transformers` cannot build a network from this config, or if the network would not generate
    text.
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
            network: Any = AutoModelForCausalLM.from_config(
                config, dtype=dtype or torch.float32, trust_remote_code=False
            )
            network.tie_weights()
    except Exception as error:
        raise ReleaseError(
            f"{folder / CONFIG_FILE}: transformers cannot build a network that generates text: "
            f"{error}"
        ) from error
    built: nn.Module = network.eval()
    return built


def load_weights(network: Any, tensors: "Mapping[str, Tensor]") -> None:
    """Put all stored tensors into the network, without copying those that need no conversion.
    `tensors` is stored name → tensor, with the dtype of the network; all are on one device.

    Raises ReleaseError if the stored tensors do not fit the network. The error names every stored
    tensor that the network does not use, every tensor that is missing, and every tensor that has
    the wrong shape.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    settings = LoadStateDictConfig(
        ignore_mismatched_sizes=True,  # they are reported below
        device_map={"": next(iter(tensors.values())).device},
        weight_mapping=get_model_conversion_mapping(network),
    )
    found, _ = convert_and_load_state_dict_in_model(
        model=network,
        state_dict=dict(tensors),
        load_config=settings,
        disk_offload_index=None,
    )
    network.tie_weights(missing_keys=found.missing_keys)
    network._adjust_missing_and_unexpected_keys(found)
    reasons = [
        *(f"tensor {name}: in no shard of the release" for name in sorted(found.missing_keys)),
        *(
            f"tensor {name}: the network of {CONFIG_FILE} has no such tensor"
            for name in sorted(found.unexpected_keys)
        ),
        *(
            f"tensor {name}: has shape {list(shape)}, but {CONFIG_FILE} asks for {list(wanted)}"
            for name, shape, wanted in sorted(found.mismatched_keys)
        ),
        *(f"tensor {name}: cannot be put together" for name in sorted(found.conversion_errors)),
    ]
    if reasons:
        raise ReleaseError(*reasons)


def hub_state_dict(network: Any, tensors: "Mapping[str, Tensor]") -> "dict[str, Tensor]":
    """Converts tensors of the network to the names and shapes that checkpoints on the Hub have. The
    keys of `tensors` are the network's names."""
    from transformers.core_model_loading import revert_weight_conversion

    stored: dict[str, Tensor] = revert_weight_conversion(network, dict(tensors))
    return stored
