"""Trained weights → a release, with its lineage, its evaluation and its probe."""

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
    """Give the weights the values that they will have once stored as `dtype`.

    Before anything is measured, so that the evaluation and the probe speak of what is served.
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

    The tensors get the names that the Hub gives them, because not every engine knows those of the
    network in memory (GPT-NeoX, mixtures of experts).

    Raises ReleaseError; then nothing is left behind.
    """
    # One tensor per storage is cast once, so that tied weights stay tied.
    cast: dict[int, torch.Tensor] = {}
    tensors: dict[str, torch.Tensor] = {}
    tied: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        place = tensor.data_ptr()
        if tensor.numel() and place in cast:  # tensors without numbers are all at place 0
            tied[name] = cast[place]
        else:
            kind = dtype if tensor.is_floating_point() else tensor.dtype
            tensors[name] = cast[place] = tensor.to("cpu", kind)
    return publish_state_dict(
        pipeline_dir,
        # The second names of tied weights come last, so that they are not the stored ones.
        hub_state_dict(model, tensors) | hub_state_dict(model, tied),
        files_dir=files_dir,
        lineage=lineage,
        evaluation=evaluation.model_dump(mode="json"),
        probe=probe,
    )
