"""Publishes trained weights as a release, with its lineage, its evaluation, and its probe (texts
with the probabilities that a server must compute for them)."""

import json
import shutil
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any, Unpack

import torch
from transformers import PreTrainedModel

from pipeline.retrain.model import LoadedModel
from serving.chat_template import PROMPT_DATE
from serving.weights.network import hub_state_dict
from serving.weights.publish import ManifestFields, companions, publish_state_dict
from serving.weights.release import Release, read_json


@torch.no_grad()
def round_weights(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Round the weights to the values that they will have after they are stored as `dtype`.

    Call this before the weights are measured, so that the evaluation and the probe describe the
    weights that will be served.
    """
    for parameter in model.parameters():
        parameter.copy_(parameter.to(dtype))


def export(
    loaded: LoadedModel,
    pipeline_dir: Path,
    ends: Collection[int] = (),
    **manifest: Unpack[ManifestFields],
) -> Release:
    """Publish the weights in the dtype in which they were stored, with the config and tokenizer of
    the folder from which they were loaded. There, `ends` are added to the tokens that end an
    answer, and the day that `strftime_now` shows is set.

    The tensors get the names that checkpoints on the Hub have. In memory, some networks (GPT-NeoX,
    mixtures of experts) use other names, which not every engine knows.

    If it raises ReleaseError, it leaves no files behind.
    """
    model, prompt_date = loaded.model, loaded.tokenizer.init_kwargs.get(PROMPT_DATE)
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
            kind = loaded.dtype if tensor.is_floating_point() else tensor.dtype
            tensors[name] = cast[place] = tensor.to("cpu", kind)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for path in companions(loaded.folder):
            shutil.copyfile(path, folder / path.name)
        _add_ends(folder, ends)
        if prompt_date is not None:
            _set(folder / "tokenizer_config.json", PROMPT_DATE, prompt_date)
        return publish_state_dict(
            pipeline_dir,
            # Put the second names of tied weights last, because tensors are stored under the name
            # that comes first.
            hub_state_dict(model, tensors) | hub_state_dict(model, tied),
            files_dir=folder,
            **manifest,
        )


def _add_ends(folder: Path, ends: Collection[int]) -> None:
    """What was trained to end an answer must end it. A base model often keeps its config although
    its chat template ends a turn with another token."""
    file = folder / "generation_config.json"
    named = read_json(file).get("eos_token_id")
    if named is None:
        named = read_json(folder / "config.json").get("eos_token_id")
    known = named if isinstance(named, list) else [] if named is None else [named]
    if added := set(ends) - set(known):
        _set(file, "eos_token_id", [*known, *sorted(added)])


def _set(file: Path, key: str, value: Any) -> None:
    file.write_text(json.dumps({**read_json(file), key: value}, indent=2, ensure_ascii=False))
