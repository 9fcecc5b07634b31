"""Loads a causal language model and its tokenizer, for training and for measuring; and computes its
output layer."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.nn.functional import pad
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.logging import disable_progress_bar

from pipeline.retrain.base_model import PRESETS, longest_sequence
from pipeline.retrain.errors import BaseModelError
from pipeline.retrain.layout import ROUNDED_TO
from pipeline.retrain.settings import RetrainSettings
from serving.chat_template import PROMPT_DATE
from serving.errors import first_line

LORA_RANK = 64


@dataclass(kw_only=True)
class LoadedModel:
    model: PreTrainedModel
    """Training changes this model in place. Its weights are in float32. But on a GPU, weights that
    stay frozen (low-rank training) keep the dtype in which they are stored."""
    tokenizer: PreTrainedTokenizerBase
    folder: Path
    """The folder from which the model and the tokenizer were loaded."""
    dtype: torch.dtype
    """The dtype in which the weights are stored."""
    max_length: int
    """The largest number of tokens that the model computes as one sequence."""


def load_model(folder: Path, settings: RetrainSettings) -> LoadedModel:
    """Load the model and the tokenizer in `folder`. Raises BaseModelError if the folder holds no
    causal language model that this package can train."""
    disable_progress_bar()  # it would fill the job's log
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer, max_length = load_tokenizer(folder, settings)
    with _translated(folder):
        dtype = AutoConfig.from_pretrained(folder).dtype or torch.float32
        frozen = usual_rank(settings) > 0 and device.type == "cuda"
        model, report = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype if frozen else torch.float32, output_loading_info=True
        )
    if missing := sorted(report["missing_keys"]):
        # transformers has filled these weights with random numbers.
        raise BaseModelError(
            f"{folder} has no weights called {missing[0]} ({len(missing)} are missing); take a "
            "checkpoint whose weights have the names that transformers gives them"
        )
    return LoadedModel(
        model=model.to(device),
        tokenizer=tokenizer,
        folder=folder,
        dtype=dtype,
        max_length=max_length,
    )


def load_tokenizer(folder: Path, settings: RetrainSettings) -> tuple[PreTrainedTokenizerBase, int]:
    """Load the tokenizer in `folder`, but no weights. Returns it with the largest number of tokens
    that the model computes as one sequence. Raises BaseModelError."""
    with _translated(folder):
        config = AutoConfig.from_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
    if tokenizer.eos_token_id is None:
        raise BaseModelError(f"the tokenizer in {folder} has no end-of-sequence token; add one")
    if "strftime_now" in str(tokenizer.chat_template):
        tokenizer.init_kwargs.setdefault(PROMPT_DATE, date.today().isoformat())
    context = getattr(config, "max_position_embeddings", None)
    return tokenizer, longest_sequence(settings.train.max_length, settings.base_model, context)


@contextmanager
def _translated(folder: Path) -> Iterator[None]:
    """Turns the errors of transformers into a BaseModelError."""
    try:
        yield
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        reason = first_line(error)
        raise BaseModelError(f"{folder} cannot be loaded as a causal model: {reason}") from error


def usual_rank(settings: RetrainSettings) -> int:
    """The rank of the matrices that low-rank training adds; 0 if all weights are trained."""
    if settings.train.lora_rank is not None:
        return settings.train.lora_rank
    return 0 if settings.base_model in PRESETS else LORA_RANK


class _Output(tuple[Tensor]):
    """What the body of a model returns: only the hidden states."""

    def __getattr__(self, name: str) -> Tensor | None:
        return self[0] if name == "last_hidden_state" else None


def logits_of(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """(N, H) → (N, V), in float32: what the model's own forward pass makes of hidden states. Many
    models do more than to multiply by one matrix: they add a bias, and scale or cap the logits."""
    rows = hidden.to(model.get_output_embeddings().weight.dtype)
    if torch.is_autocast_enabled(rows.device.type):
        rows = pad(rows, (0, 0, 0, -len(rows) % ROUNDED_TO))
    # Its body is left out for this call: it hands the hidden states on to the output layer.
    body = model.get_decoder()
    body.forward = lambda *_, **__: _Output([rows[None]])
    try:
        ids = torch.zeros(1, 1, dtype=torch.long, device=hidden.device)
        logits: Tensor = model(input_ids=ids).logits
    finally:
        del body.forward
    return logits.squeeze(0)[: len(hidden)].float()


def output_weights(model: PreTrainedModel) -> list[Tensor]:
    """The weights outside the model's body that can be trained."""
    parts = [part for part in model.children() if part is not model.base_model]
    return [each for part in parts for each in part.parameters() if each.requires_grad]
