"""Makes the probe of a release: a few texts with the log probabilities that the new weights give to
their tokens. The server computes them again, to check that it serves the right weights.

The texts are computed one by one, without packing, as a server computes a prompt.
"""

from collections.abc import Iterable, Sequence

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from pipeline.retrain.head import head_of
from pipeline.retrain.layout import last_hidden_states
from pipeline.retrain.loss import score_labels
from pipeline.retrain.rows import Row
from pipeline.retrain.tokens import sequences
from serving.weights.release import Probe, ProbeText

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
    return tuple(score_labels(hidden, head_of(model), ids[0, 1:])[0].tolist())
