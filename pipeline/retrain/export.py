"""Trained weights → a release, with its lineage, its evaluation and its probe."""

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from pipeline.retrain.evaluate import Evaluation
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

    Raises ReleaseError; then nothing is left behind.
    """
    # One tensor per storage is cast once, so that tied weights stay tied.
    cast: dict[int, torch.Tensor] = {}
    tensors = {}
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            tensor = cast.setdefault(tensor.data_ptr(), tensor.to("cpu", dtype))
        tensors[name] = tensor
    return publish_state_dict(
        pipeline_dir,
        tensors,
        files_dir=files_dir,
        lineage=lineage,
        evaluation=evaluation.model_dump(mode="json"),
        probe=probe,
    )
