"""Anchors: everyday prompts that show what a base model knew before it was trained here.

The base model answers them once; its answers are kept in a folder under `bases/`. The answers to
some anchors are mixed into training, so that the model keeps them. The other anchors are never
trained on. They show how far the answers have drifted (moved away from those of the base model).
"""

import codecs
import hashlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from pipeline.retrain.asking import generate
from pipeline.retrain.errors import DataError
from pipeline.retrain.loss import AnchorTarget, autocast, predict, row_losses
from pipeline.retrain.model import LoadedModel, logits_of
from pipeline.retrain.rows import Row
from pipeline.retrain.tokens import TokenSequence, answer_ends, chat_template, leave_out, sequences
from serving.chat_template import normalise
from serving.weights.atomic_file import atomic_file

logger = logging.getLogger(__name__)

PACKAGED = Path(__file__).with_name("anchors.jsonl")
FORM = '`{"kind": "poem", "measured": true, "prompt": "Write a haiku about snow."}`'
ANSWERS_DIR = "answers"
"""The folder of the answers, under `bases/`. All pipelines share it."""
ANSWER_TOKENS = 32
"""The largest number of tokens in an answer."""
LIKELIEST = 32
"""At each token of an answer, the probabilities of this many tokens are kept: the likeliest
ones."""
MEASURED_ROWS = 8
"""The logits of this many answers are in memory at once. With a vocabulary of 49,152, the logits of
256 tokens take 50 MB."""


class Anchor(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    kind: str = Field(min_length=1)
    """The kind of task, such as "poem". Measure all anchors of a kind or none: training on a prompt
    also keeps the answers to others of its kind, so the drift would look smaller than it is."""
    measured: bool
    """Whether the drift is measured on this anchor. If so, it is never trained on."""
    prompt: str = Field(min_length=1)
    """A question or the beginning of a text. With a chat template, it is the message of the user.
    Without one, the model continues it."""


def load_anchors(path: Path | None = None) -> tuple[Anchor, ...]:
    """The anchors in the `.jsonl` file `path`. If it is None, those in the package. Raises
    DataError."""
    path = path or PACKAGED
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError.at(
            path, None, f"cannot be read ({error.strerror}); write lines as {FORM}"
        ) from error
    anchors: list[Anchor] = []
    for line, text in enumerate(content.removeprefix(codecs.BOM_UTF8).splitlines(), start=1):
        if not text.strip():
            continue
        try:
            anchors.append(Anchor.model_validate_json(text))
        except ValidationError as error:
            first = error.errors()[0]
            where = "".join(f"`{name}`: " for name in first["loc"])
            problem = f"{where}{first['msg']}; an anchor is {FORM}"
            raise DataError.at(path, line, problem) from error
    if not anchors:
        raise DataError.at(path, None, f"holds no anchor; write lines as {FORM}")
    return tuple(anchors)


def base_answers(
    folder: Path,
    base: str,
    anchors: Sequence[Anchor],
    load: Callable[[], LoadedModel],
    tell: Callable[[int, int], None] = lambda answered, prompts: None,
) -> tuple[tuple[AnchorTarget, ...], tuple[AnchorTarget, ...]]:
    """The base model's answers to `anchors`, as two tuples: answers to train on, and answers that
    are only measured. They are read from `folder` if an earlier job has made them.

    base: a text that identifies the base model. load: loads the base model. It is called only if
    the answers must be made. tell: called after each batch of answers, with the number of answered
    prompts and the number of prompts.
    """
    digest = hashlib.sha256(
        "\n".join([base, *(anchor.model_dump_json() for anchor in anchors)]).encode()
    ).hexdigest()
    path = folder / f"anchors-{digest[:16]}.pt"
    if not path.exists():
        logger.info("the base model answers %d everyday prompts, once", len(anchors))
        tell(0, len(anchors))
        loaded = load()
        made = _likeliest(loaded, _answer(loaded, anchors, tell))
        path.parent.mkdir(parents=True, exist_ok=True)
        # Jobs of several pipelines may do this at the same time, but they write the same answers.
        with atomic_file(path) as file:
            torch.save(made, file)
    targets = [
        AnchorTarget(TokenSequence(token_ids, learned, number, is_noisy=False), likeliest, logprobs)
        for number, (token_ids, learned, likeliest, logprobs) in enumerate(
            torch.load(path, weights_only=True)
        )
    ]
    pairs = list(zip(anchors, targets, strict=True))
    trained = tuple(target for anchor, target in pairs if not anchor.measured)
    measured = tuple(target for anchor, target in pairs if anchor.measured)
    return trained, measured


def agreement(
    model: PreTrainedModel,
    anchors: Sequence[AnchorTarget],
    on_batch: Callable[[int], None] = lambda _: None,
) -> float:
    """The share of the tokens in the base model's answers `anchors` that `model` finds likeliest.

    on_batch: called after each batch, with the number of answers in this batch.
    """
    losses = row_losses(model, [each.sequence for each in anchors], on_batch)
    return sum(loss.num_right for loss in losses) / sum(loss.num_tokens for loss in losses)


def _answer(
    loaded: LoadedModel, anchors: Sequence[Anchor], tell: Callable[[int, int], None]
) -> list[TokenSequence]:
    """Generate the greedy answers."""
    tokenizer = loaded.tokenizer
    prompts = [_prompt(loaded, anchor.prompt) for anchor in anchors]
    ends = {tokenizer.eos_token_id, *_turn_ends(tokenizer)}
    answered = 0

    def on_batch(count: int) -> None:
        nonlocal answered
        answered += count
        tell(answered, len(anchors))

    answers = generate(loaded, prompts, [ANSWER_TOKENS] * len(prompts), ends, on_batch)
    return [
        TokenSequence((*prompt, *made), (False,) * len(prompt) + (True,) * len(made), index)
        for index, (prompt, made) in enumerate(zip(prompts, answers, strict=True))
    ]


@torch.no_grad()
def _likeliest(
    loaded: LoadedModel, answers: Sequence[TokenSequence]
) -> list[tuple[tuple[int, ...], tuple[bool, ...], Tensor, Tensor]]:
    """The tokens of each answer with its prompt, and which of them are the answer; and at each
    token of the answer, the likeliest tokens and their log probabilities."""
    found = []
    for start in range(0, len(answers), MEASURED_ROWS):
        some = answers[start : start + MEASURED_ROWS]
        with autocast(loaded.model.device):
            hidden, _ = predict(loaded.model, [[each] for each in some])
            logits = logits_of(loaded.model, hidden)
        best = torch.log_softmax(logits, dim=-1).topk(LIKELIEST)
        lengths = [each.num_learned for each in some]
        parts = (torch.split(each.cpu(), lengths) for each in (best.indices, best.values))
        for each, token_ids, logprobs in zip(some, *parts, strict=True):
            # Without the clones, `torch.save` would write the whole tensor for each part.
            found.append((each.token_ids, each.learned, token_ids.clone(), logprobs.clone()))
    return found


def _prompt(loaded: LoadedModel, text: str) -> list[int]:
    tokenizer = loaded.tokenizer
    template = chat_template(tokenizer)
    if template is not None:
        text = template.render(normalise([{"role": "user", "content": text}]))
    ids: list[int] = tokenizer(text, add_special_tokens=template is None, verbose=False)[
        "input_ids"
    ]
    ids = ids or [tokenizer.eos_token_id]
    return ids[-(loaded.max_length - ANSWER_TOKENS) :]


def _turn_ends(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The token with which the chat template ends an answer."""
    talk = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello"}]
    row = Row(messages=tuple(talk), file="anchor", number=0)
    return answer_ends(sequences([row], tokenizer, 1 << 20, on_refused=leave_out), tokenizer)
