"""Publishes trained weights as a release, with its lineage, its evaluation, and its probe: a few
texts with the log probabilities that the new weights give to their tokens. The server computes them
again, to check that it serves the right weights. The texts are computed one by one, without
packing, as a server computes a prompt.
"""

import json
import shutil
import tempfile
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, Unpack

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from pipeline.retrain.layout import last_hidden_states
from pipeline.retrain.loss import score_labels
from pipeline.retrain.model import LoadedModel
from pipeline.retrain.rows import Row
from pipeline.retrain.tokens import sequences
from serving.chat_template import PROMPT_DATE
from serving.questions import Question, write_questions
from serving.weights.network import hub_state_dict
from serving.weights.publish import ManifestFields, companions, publish_state_dict
from serving.weights.release import Probe, ProbeText, Release, read_json

TEXTS_PER_GROUP = 2
MAX_TOKENS = 64
FLOAT32_BOUNDS = 2e-3, 8e-3
"""The smallest and the largest bound for a server that computes in float32, in nats. Two float32
implementations differ by about 1e-5. The weights of two releases differ by 1e-2 or more."""
FLOAT32_FACTOR = 2e-4
"""Between these limits, the float32 bound is this many times the largest -log p of any token. If a
network is very sure, its logits are large. After many layers, float32 is off by about 1e-4 of a
logit."""
LOW_PRECISION_FLOOR = 0.05
LOW_PRECISION_FACTOR = 4.0
"""The bounds for bfloat16 and float16 are this many times the difference that is measured here with
autocast. A server rounds in more places than autocast."""


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
    questions: Sequence[Question] = (),
    **manifest: Unpack[ManifestFields],
) -> Release:
    """Publish the weights in the dtype in which they were stored, with the config and tokenizer of
    the folder from which they were loaded, and with the `questions` of the rows. The model in
    memory then has this dtype too. In the files, `ends` are added to the tokens that end an answer,
    and the day that `strftime_now` shows is set.

    The tensors get the names that checkpoints on the Hub have. In memory, some networks (GPT-NeoX,
    mixtures of experts) use other names, which not every engine knows.

    If it raises ReleaseError, it leaves no files behind.
    """
    model, prompt_date = loaded.model, loaded.tokenizer.init_kwargs.get(PROMPT_DATE)
    state = model.to("cpu", loaded.dtype).state_dict()
    # Tied weights are one tensor with several names. All empty tensors have the address 0.
    first_names = {tensor.data_ptr(): name for name, tensor in reversed(state.items())}
    tied = {
        name: tensor
        for name, tensor in state.items()
        if tensor.numel() and first_names[tensor.data_ptr()] != name
    }
    tensors = {name: tensor for name, tensor in state.items() if name not in tied}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for path in companions(loaded.folder):
            shutil.copyfile(path, folder / path.name)
        _add_ends(folder, ends)
        write_questions(folder, questions)
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


def probe_texts(
    groups: Sequence[Sequence[Row]], tokenizer: PreTrainedTokenizerBase, max_length: int
) -> list[tuple[int, ...]]:
    """The token ids of the probe's texts: the first rows of each group. Long rows are cut, so that
    the probe is quick."""
    texts = [
        sequence.token_ids[:MAX_TOKENS]
        for rows in groups
        for sequence in sequences(rows[:TEXTS_PER_GROUP], tokenizer, max_length)[:TEXTS_PER_GROUP]
    ]
    return list(dict.fromkeys(texts))


def float32_bound(logprobs: Iterable[Iterable[float]]) -> float:
    """The bound for a server that computes in float32: by how many nats its log probabilities may
    differ from `logprobs`."""
    largest = max((-logprob for text in logprobs for logprob in text), default=0.0)
    least, most = FLOAT32_BOUNDS
    return min(max(least, FLOAT32_FACTOR * largest), most)


def make_probe(model: PreTrainedModel, texts: Sequence[tuple[int, ...]]) -> Probe:
    """Compute the log probabilities of `texts`, and how much those of a server may differ.

    `model` must hold the weights as they will be stored. The bounds for bfloat16 and float16 are
    measured, because the effect of rounding is different for each model.
    """
    model.eval()
    exact = [_logprobs(model, text) for text in texts]
    bounds = {"float32": float32_bound(exact)}
    for name, dtype in (("bfloat16", torch.bfloat16), ("float16", torch.float16)):
        with torch.autocast(model.device.type, dtype):
            rounded = [_logprobs(model, text) for text in texts]
        off = max(
            abs(a - b)
            for one, other in zip(exact, rounded, strict=True)
            for a, b in zip(one, other, strict=True)
        )
        bounds[name] = max(LOW_PRECISION_FLOOR, LOW_PRECISION_FACTOR * off)
    return Probe(
        dtype="float32",
        texts=tuple(
            ProbeText(token_ids=text, logprobs=logprobs)
            for text, logprobs in zip(texts, exact, strict=True)
        ),
        bounds=bounds,
    )


@torch.no_grad()
def _logprobs(model: PreTrainedModel, text: tuple[int, ...]) -> tuple[float, ...]:
    ids = torch.tensor([text], device=model.device)
    hidden = last_hidden_states(model, ids)[0, :-1]
    return tuple(score_labels(model, hidden, ids[0, 1:])[0].tolist())
