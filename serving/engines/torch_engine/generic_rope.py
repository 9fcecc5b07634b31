"""RoPE whose frequencies depend on the length of the text, for networks that `transformers` runs:
LongRoPE (arXiv:2402.13753) and dynamic NTK scaling.

`transformers` chooses these frequencies again in each forward pass, from the largest position in
it. In the engine, a forward pass computes several sequences or a part of one, and the slots hold
keys of earlier passes. So an answer would depend on other sequences and on how its prompt was
divided. Here the frequencies are chosen once for a release, as vLLM does for LongRoPE.
"""

import logging
from collections.abc import Iterator
from typing import Any

import torch

from serving.weights.network import context_length

_log = logging.getLogger(__name__)


def allowed_context(config: Any, max_context: int | None) -> int:
    """The largest number of tokens in a sequence that the network allows.

    LongRoPE has two sets of frequencies: one for texts of `original_max_position_embeddings`
    tokens, one for longer texts. Training and probes use short texts, and so the first set. The
    second one is used only if `max_context` asks for a longer context.
    """
    allowed = context_length(config)
    original = min(_original_contexts(config), default=allowed)
    if max_context is None and original < allowed:
        _log.warning(
            "max_context is lowered to %d: with a longer context, up to %d, LongRoPE has other "
            "frequencies, and even the answers to short prompts change",
            *(original, allowed),
        )
        return original
    return allowed


def freeze_frequencies(network: Any, context: int) -> None:
    """Let every forward pass use the frequencies for texts of `context` tokens."""
    weight = next(network.parameters())
    last = torch.tensor([[context - 1]], device=weight.device)
    for module, layer_type in list(_changing(network)):
        # A forward pass chooses the frequencies for its last position.
        module(weight, last, *(() if layer_type is None else (layer_type,)))
    keep_frequencies(network)


def keep_frequencies(network: Any) -> None:
    """Let every forward pass use the frequencies that the network has now."""
    for module, layer_type in list(_changing(network)):
        if layer_type is None:
            module.rope_type = "default"
        else:
            module.rope_type[layer_type] = "default"


def _changing(network: Any) -> Iterator[tuple[Any, str | None]]:
    """The modules that choose frequencies in each forward pass. A module that does this for several
    kinds of layers comes once with each kind."""
    for module in network.modules():
        kinds = getattr(module, "rope_type", None)
        for layer_type, kind in kinds.items() if isinstance(kinds, dict) else ((None, kinds),):
            if kind is not None and (kind == "longrope" or "dynamic" in kind):
                yield module, layer_type


def _original_contexts(config: Any) -> Iterator[int]:
    """`original_max_position_embeddings` of each kind of layers with LongRoPE."""
    parameters = getattr(config.get_text_config(), "rope_parameters", None) or {}
    for each in (parameters, *parameters.values()):
        if isinstance(each, dict) and each.get("rope_type") == "longrope":
            yield each["original_max_position_embeddings"]
