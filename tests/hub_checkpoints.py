"""Small random checkpoints of many architectures, stored as the Hub stores them.

`transformers` makes the networks, and its own map leads from their names to the stored ones.
"""

from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedConfig

from serving.weights.network import hub_state_dict
from tests.torch_engine_fixtures import COMMON, SHAPE, VOCAB, build

CONTEXT = 128
WINDOW = 24
"""Shorter than the sequences of the tests, so that it is felt."""

_COMMON = {**COMMON, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_EXPERTS = {"num_experts_per_tok": 2}

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {**SHAPE, "tie_word_embeddings": True}),
    "mistral": ("Mistral", {**SHAPE, "sliding_window": WINDOW}),
    "qwen2": ("Qwen2", SHAPE),
    "qwen3": ("Qwen3", {**SHAPE, "head_dim": 32}),
    "gemma2": ("Gemma2", {**SHAPE, "head_dim": 16, "sliding_window": WINDOW}),
    "gemma3": ("Gemma3Text", {**SHAPE, "head_dim": 16, "sliding_window": WINDOW}),
    "gemma3 with images": (
        "Gemma3",
        {
            "text_config": {
                **SHAPE,
                "model_type": "gemma3_text",
                "head_dim": 16,
                "sliding_window": WINDOW,
            },
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 28,
                "patch_size": 14,
            },
            "mm_tokens_per_image": 4,
            "image_token_index": 5,
            "boi_token_index": 6,
            "eoi_token_index": 7,
        },
    ),
    "phi3": ("Phi3", {**SHAPE, "sliding_window": WINDOW}),
    "olmo2": ("Olmo2", SHAPE),
    "gpt2": (
        "GPT2",
        {
            "vocab_size": VOCAB,
            "n_embd": 64,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": CONTEXT,
            "initializer_range": 0.3,
            "bos_token_id": None,
            "eos_token_id": None,
        },
    ),
    "gpt_neox": (
        "GPTNeoX",
        {**_COMMON, "intermediate_size": 96, "max_position_embeddings": CONTEXT},
    ),
    "opt": (
        "OPT",
        {
            **_COMMON,
            "ffn_dim": 96,
            "word_embed_proj_dim": 64,
            "max_position_embeddings": CONTEXT,
            "init_std": 0.3,
        },
    ),
    "bloom": ("Bloom", _COMMON),
    "falcon": ("Falcon", {**_COMMON, "max_position_embeddings": CONTEXT}),
    "falcon with alibi": (
        "Falcon",
        {**_COMMON, "alibi": True, "multi_query": False, "max_position_embeddings": CONTEXT},
    ),
    "mixtral": ("Mixtral", {**SHAPE, **_EXPERTS, "num_local_experts": 4}),
    "qwen3_moe": (
        "Qwen3Moe",
        {**SHAPE, **_EXPERTS, "head_dim": 16, "num_experts": 4, "moe_intermediate_size": 48},
    ),
}


def config_of(name: str) -> PreTrainedConfig:
    kind, settings = CONFIGS[name]
    config: PreTrainedConfig = getattr(transformers, f"{kind}Config")(**settings)
    return config


def store(name: str, folder: Path, seed: int = 0) -> Any:
    """Write a checkpoint folder; the network that it is of."""
    network: Any = build(config_of(name), seed)
    save(network, folder)
    return network


def save(network: Any, folder: Path) -> None:
    folder.mkdir(parents=True)
    network.config.architectures = [type(network).__name__]
    network.config.save_pretrained(folder)
    tensors = stored_tensors(network)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    # One word for each token: answers in text say which tokens they are made of.
    vocabulary = {f"w{number}": number for number in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))


def stored_tensors(network: Any) -> dict[str, torch.Tensor]:
    tied = set(network._tied_weights_keys or ()) if network.config.tie_word_embeddings else set()
    own = {name: tensor for name, tensor in network.state_dict().items() if name not in tied}
    tensors = {name: each.contiguous() for name, each in hub_state_dict(network, own).items()}
    if network.config.model_type == "gpt2":
        # As OpenAI's are: the base model alone, with the masks of its first release.
        tensors = {name.removeprefix("transformer."): each for name, each in tensors.items()}
        mask = torch.ones(CONTEXT, CONTEXT, dtype=torch.uint8).tril()[None, None]
        tensors |= {f"h.{layer}.attn.bias": mask.clone() for layer in range(2)}
    if network.config.model_type == "gpt_neox":
        # As Pythia's are: with buffers that later networks compute themselves.
        for layer in range(2):
            at = f"gpt_neox.layers.{layer}.attention"
            mask = torch.ones(1, 1, CONTEXT, CONTEXT, dtype=torch.bool).tril()
            tensors |= {f"{at}.bias": mask, f"{at}.masked_bias": torch.tensor(-1e9)}
            tensors[f"{at}.rotary_emb.inv_freq"] = torch.ones(8)
    return tensors
