"""Tiny models and releases for the tests of the serving room."""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.set_num_threads(1)


def tiny_llama(*, tied: bool = True, seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config).eval()


def save_config(model: LlamaForCausalLM, folder: Path) -> Path:
    """Config files without weights, as a trainer has them beside its weights in memory."""
    folder.mkdir(parents=True, exist_ok=True)
    model.config.save_pretrained(folder)
    return folder
