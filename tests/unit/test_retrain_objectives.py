"""The loss that keeps the base model's answers."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import kl_div, log_softmax

from pipeline.retrain.loss import AnchorTarget, keep_base
from pipeline.retrain.model import Head
from tests.training_fixtures import VOCABULARY, make_model, one_thread, plan_of, rows
from tests.unit.test_retrain_group import anchor, gradient

__all__ = ["one_thread"]


def with_rest(logprobs: Tensor, token_ids: Tensor) -> Tensor:
    """The log probabilities of these tokens, and that of all other tokens together."""
    chosen = logprobs.gather(-1, token_ids)
    rest = (1 - chosen.exp().sum(-1, keepdim=True)).clamp_min(1e-6).log()
    return torch.cat([chosen, rest], dim=-1)


def kl_of(logits: Tensor, anchors: list[AnchorTarget]) -> Tensor:
    token_ids = torch.cat([each.token_ids for each in anchors])
    own = with_rest(log_softmax(logits, dim=-1), token_ids)
    kept = torch.cat([each.logprobs for each in anchors])
    base = torch.cat([kept, (1 - kept.exp().sum(-1, keepdim=True)).clamp_min(1e-6).log()], dim=-1)
    return kl_div(own, base, log_target=True, reduction="sum")


def test_it_is_the_kl_divergence_from_the_base_model() -> None:
    torch.manual_seed(0)
    head, hidden = Head(torch.randn(VOCABULARY, 16)), torch.randn(4, 16)
    base = log_softmax(torch.randn(4, VOCABULARY), dim=-1)
    [sequence] = rows(1, length=5)

    def found(num_likeliest: int) -> tuple[float, AnchorTarget]:
        likeliest = base.topk(num_likeliest)
        target = AnchorTarget(sequence, likeliest.indices, likeliest.values)
        return float(keep_base(hidden, head, [target])), target

    own = log_softmax(head.logits(hidden), dim=-1)
    whole = kl_div(own, base, log_target=True, reduction="sum")
    assert found(VOCABULARY)[0] == pytest.approx(float(whole), rel=1e-4)
    # Of the base model's probabilities, only the largest ones are known.
    some, target = found(8)
    assert some == pytest.approx(float(kl_of(head.logits(hidden), [target])), rel=1e-4)
    assert 0 < some < whole


def test_a_step_adds_its_gradient_per_token_to_that_of_the_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = rows(9, length=6)[7:]
    anchors = [anchor(sequence) for sequence in answers]
    alone = gradient(monkeypatch, plan_of(rows(2)), 2, 0, 1)
    plan = plan_of(rows(2), anchors=tuple(anchors), anchor_ratio=9.0)
    both = gradient(monkeypatch, plan, 2, 0, 1)

    model = make_model()
    ids = torch.tensor([sequence.token_ids for sequence in answers])
    logits = model(input_ids=ids).logits[:, :-1].flatten(0, 1)
    (kl_of(logits, anchors) / len(logits)).backward()  # type: ignore[no-untyped-call]
    parameters = [each for each in model.parameters() if each.ndim >= 2]
    parameters += [each for each in model.parameters() if each.ndim < 2]  # the optimizer's order
    expected = torch.cat([each.grad.flatten() for each in parameters if each.grad is not None])
    assert expected.abs().max() > 1e-4
    torch.testing.assert_close(both - alone, expected, rtol=1e-3, atol=1e-6)
