"""LoRA: train small matrices beside the frozen ones, and add them in at the end, so that a release
is a whole model like any other."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING

from pipeline.retrain.errors import RetrainError
from pipeline.retrain.settings import TrainSettings

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

ALPHA_PER_RANK = 2


def check_lora(settings: TrainSettings) -> None:
    """Raise RetrainError where LoRA is asked for and not installed."""
    if settings.lora_rank is not None and find_spec("peft") is None:
        raise RetrainError(
            "`train.lora_rank` needs peft, which is not installed: pip install 'hotpush[lora]', or "
            "take the setting out to train all weights"
        )


def first_factors(weights: Mapping[str, "Tensor"]) -> dict[str, "Tensor"]:
    """Of each pair of matrices the one that is multiplied first; nothing where there are none.

    What a pair adds is its product, so half of the other factor, which began at zero, adds half."""
    return {name: tensor for name, tensor in weights.items() if ".lora_A." in name}


@contextmanager
def lora(model: "PreTrainedModel", settings: TrainSettings) -> Iterator[None]:
    """Inside, `model` has trainable matrices of rank `lora_rank` beside every linear layer but the
    output layer, and nothing else to train; afterwards they are merged. Without a rank, nothing
    happens."""
    if settings.lora_rank is None:
        yield
        return
    import torch
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(settings.seed)
    wrapped = get_peft_model(
        model,
        LoraConfig(
            r=settings.lora_rank,
            lora_alpha=ALPHA_PER_RANK * settings.lora_rank,
            target_modules="all-linear",
        ),
    )
    yield
    merged = wrapped.merge_and_unload()
    if merged is not model:
        raise AssertionError("peft is to merge in place")
    model.requires_grad_(True)
