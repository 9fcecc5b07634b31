"""Publishes trained weights as a release, with its lineage, its evaluation, and its probe (texts
with the probabilities that a server must compute for them)."""

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from pipeline.retrain.evaluate import Evaluation
from serving.weights.network import hub_state_dict
from serving.weights.publish import publish_state_dict
from serving.weights.release import Lineage, Probe, Release

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@torch.no_grad()
def round_weights(model: "PreTrainedModel", dtype: torch.dtype) -> None:
    """Round the weights to the values that they will have after they are stored as `dtype`.

    Call this before the weights are measured, so that the evaluation and the probe describe the
    weights that will be served.
    """
    for parameter in model.parameters():
        parameter.copy_(parameter.to(dtype))


def export(
    model: "PreTrainedModel",
    dtype: torch.dtype,
    *,
    pipeline_dir: Path,
    files_dir: Path,
    lineage: Lineage,
    evaluation: Evaluation,
    probe: Probe,
) -> Release:
    """Publish the weights as `dtype`, with the config and tokenizer of `files_dir`.

    The tensors get the names that checkpoints on the Hub have. In memory, some networks (GPT-NeoX,
    mixtures of experts) use other names, which not every engine knows.

    If it raises ReleaseError, it leaves no files behind.
    """
    # Tied weights are one tensor with several names. Cast this tensor only once, so that the names
    # still share one tensor.
    cast: dict[int, torch.Tensor] = {}
    tensors: dict[str, torch.Tensor] = {}
    tied: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        place = tensor.data_ptr()
        if tensor.numel() and place in cast:  # all empty tensors have the address 0
            tied[name] = cast[place]
        else:
            kind = dtype if tensor.is_floating_point() else tensor.dtype
            tensors[name] = cast[place] = tensor.to("cpu", kind)
    return publish_state_dict(
        pipeline_dir,
        # Put the second names of tied weights last, because tensors are stored under the name that
        # comes first.
        hub_state_dict(model, tensors) | hub_state_dict(model, tied),
        files_dir=files_dir,
        lineage=lineage,
        evaluation=evaluation.model_dump(mode="json"),
        probe=probe,
    )
