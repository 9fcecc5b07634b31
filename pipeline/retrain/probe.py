"""The probe: what the new weights say about a few texts, for the server to measure again.

Texts are scored one by one, without packing, as a server scores a prompt.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from pipeline.retrain.head import head_of
from pipeline.retrain.layout import last_hidden_states
from pipeline.retrain.loss import label_logprobs
from pipeline.retrain.rows import Row
from pipeline.retrain.tokens import sequences
from serving.weights.release import Probe, ProbeText

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

TEXTS_PER_GROUP = 2
MAX_TOKENS = 64
FLOAT32_BOUNDS = 2e-3, 8e-3
"""The least and the most. Two float32 implementations differ by some 1e-5; weights of another
release by 1e-2 and more."""
FLOAT32_FACTOR = 2e-4
"""Of the least probable token's logprob: where a network is sure, its logits are large, and float32
is off by some 1e-4 of a logit after many layers."""
LOW_PRECISION_FLOOR = 0.05
LOW_PRECISION_FACTOR = 4.0
"""A server rounds in more places than the autocast that stands in for it here."""


def probe_texts(
    groups: Sequence[Sequence[Row]], tokenizer: "PreTrainedTokenizerBase", max_length: int
) -> list[tuple[int, ...]]:
    """Token ids of a few texts: of each group the first rows, cut to a length that is quick."""
    texts = [
        sequence.token_ids[:MAX_TOKENS]
        for rows in groups
        for sequence in sequences(rows[:TEXTS_PER_GROUP], tokenizer, max_length)[:TEXTS_PER_GROUP]
    ]
    return list(dict.fromkeys(texts))


def float32_bound(logprobs: Iterable[Iterable[float]]) -> float:
    """Nats by which a server that computes in float32 may be off on texts of these logprobs."""
    largest = max((-logprob for text in logprobs for logprob in text), default=0.0)
    least, most = FLOAT32_BOUNDS
    return min(max(least, FLOAT32_FACTOR * largest), most)


def make_probe(model: "PreTrainedModel", texts: Sequence[tuple[int, ...]]) -> Probe:
    """Score `texts` with the weights as they will be stored, and bound what may differ.

    The bound for a lower precision is measured: what rounding does differs from model to model.
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
def _logprobs(model: "PreTrainedModel", text: tuple[int, ...]) -> tuple[float, ...]:
    ids = torch.tensor([text], device=model.device)
    hidden = last_hidden_states(model, ids)[0, :-1]
    return tuple(label_logprobs(hidden, head_of(model), ids[0, 1:]).tolist())
