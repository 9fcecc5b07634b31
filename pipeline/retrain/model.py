"""A causal model with its tokenizer, as training and measuring need it."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from pipeline.retrain.base_model import PRESETS, longest_sequence
from pipeline.retrain.errors import BaseModelError
from pipeline.retrain.scoring import check_head
from pipeline.retrain.settings import RetrainSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

LORA_RANK = 128


@dataclass(kw_only=True)
class LoadedModel:
    model: "PreTrainedModel"
    """Trained in place. In float32, or, where its weights stay frozen on a GPU, as stored."""
    tokenizer: "PreTrainedTokenizerBase"
    folder: Path
    """Where both come from."""
    dtype: torch.dtype
    """That the weights are stored in."""
    max_length: int
    """Tokens that are looked at together, at most."""


def load_model(folder: Path, settings: RetrainSettings) -> LoadedModel:
    """Load weights, to be trained or to be frozen. Raises BaseModelError for a folder without a
    causal language model that can be trained here."""
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    transformers.utils.logging.disable_progress_bar()  # it fills the job's log
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        config = AutoConfig.from_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        dtype = config.dtype or torch.float32
        frozen = usual_rank(settings) > 0 and device.type == "cuda"
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype if frozen else torch.float32
        )
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise BaseModelError(f"{folder} cannot be loaded as a causal model: {reason}") from error
    if tokenizer.eos_token_id is None:
        raise BaseModelError(f"the tokenizer in {folder} has no end-of-sequence token; add one")
    model = model.to(device)
    check_head(model)
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        folder=folder,
        dtype=dtype,
        max_length=longest_sequence(
            settings.train.max_length,
            settings.base_model,
            getattr(config, "max_position_embeddings", None),
        ),
    )


def usual_rank(settings: RetrainSettings) -> int:
    """Of the matrices that are trained; 0 trains all weights."""
    if settings.train.lora_rank is not None:
        return settings.train.lora_rank
    return 0 if settings.base_model in PRESETS else LORA_RANK
