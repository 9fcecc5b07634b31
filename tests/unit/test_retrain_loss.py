"""The losses of a step, by one process or by several; a row counts as learned when greedy decoding
says it."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import kl_div, log_softmax
from transformers import LlamaForCausalLM

from pipeline.retrain import loss
from pipeline.retrain import train as loop
from pipeline.retrain.checkpoint import TrainingState
from pipeline.retrain.loss import (
    KEEP_BASE,
    AnchorTarget,
    RowLoss,
    keep_base,
    row_losses,
)
from pipeline.retrain.model import logits_of
from pipeline.retrain.plan import TrainingPlan
from pipeline.retrain.settings import TrainSettings
from pipeline.retrain.tokens import TokenSequence
from tests.training_fixtures import VOCABULARY, make_model, one_thread, plan_of, rows

__all__ = ["one_thread"]


PROMPT = (5, 3, 8)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return make_model()


@torch.no_grad()
def greedy(model: LlamaForCausalLM, num_tokens: int) -> tuple[int, ...]:
    """What the model says after PROMPT at temperature 0, token by token."""
    ids = list(PROMPT)
    for _ in range(num_tokens):
        ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    return tuple(ids[len(PROMPT) :])


def answer(tokens: tuple[int, ...], row: int = 0) -> TokenSequence:
    learned = (False,) * len(PROMPT) + (True,) * len(tokens)
    return TokenSequence(PROMPT + tokens, learned, row)


def test_what_greedy_decoding_says_is_learned(model: LlamaForCausalLM) -> None:
    said = greedy(model, 12)
    other = (*said[:-1], (said[-1] + 1) % VOCABULARY)
    first, second = row_losses(model, [answer(said, row=4), answer(other, row=7)])
    assert (first.row, first.num_right, first.num_tokens, first.is_learned) == (4, 12, 12, True)
    assert (second.row, second.num_right, second.num_tokens, second.is_learned) == (
        7,
        11,
        12,
        False,
    )
    assert first.nats < second.nats


def test_the_pieces_of_a_row_are_counted_together(model: LlamaForCausalLM) -> None:
    said = greedy(model, 6)
    (found,) = row_losses(model, [answer(said), answer(said[:2])])
    assert (found.num_right, found.num_tokens) == (8, 8)


@pytest.mark.parametrize(
    ("num_right", "num_tokens", "is_learned"),
    [(64, 64, True), (63, 64, False), (65, 65, True), (59, 65, True), (58, 65, False)],
)
def test_a_long_row_is_learned_at_nine_tenths(
    num_right: int, num_tokens: int, is_learned: bool
) -> None:
    row = RowLoss(row=0, nats=1.0, num_tokens=num_tokens, num_right=num_right)
    assert row.is_learned is is_learned


@pytest.mark.parametrize("is_fast", [True, False])
@pytest.mark.parametrize("is_large", [True, False])
def test_a_cpu_trains_in_bfloat16_if_that_is_fast_and_the_network_is_large(
    model: LlamaForCausalLM, is_fast: bool, is_large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss, "is_fast_in_bfloat16", lambda device_type: is_fast)
    limit = model.num_parameters() if is_large else model.num_parameters() + 1
    monkeypatch.setattr(loss, "BFLOAT16_PARAMETERS", limit)
    with loss.training_autocast(model):
        assert torch.is_autocast_enabled("cpu") is (is_fast and is_large)
    with loss.autocast(model.device):
        assert not torch.is_autocast_enabled("cpu"), "measurements stay exact"


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
    model, hidden = make_model().requires_grad_(False), torch.randn(4, 16)
    base = log_softmax(torch.randn(4, VOCABULARY), dim=-1)
    [sequence] = rows(1, length=5)

    def found(num_likeliest: int) -> tuple[float, AnchorTarget]:
        likeliest = base.topk(num_likeliest)
        target = AnchorTarget(sequence, likeliest.indices, likeliest.values)
        return float(keep_base(model, hidden, [target])), target

    own = log_softmax(logits_of(model, hidden), dim=-1)
    whole = kl_div(own, base, log_target=True, reduction="sum")
    assert found(VOCABULARY)[0] == pytest.approx(float(whole), rel=1e-4)
    # Of the base model's probabilities, only the largest ones are known.
    some, target = found(8)
    assert some == pytest.approx(float(kl_of(logits_of(model, hidden), [target])), rel=1e-4)
    assert 0 < some < whole


def test_a_step_adds_its_gradient_per_token_to_that_of_the_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = rows(9, length=6)[7:]
    anchors = [anchor(sequence) for sequence in answers]
    alone = gradient(monkeypatch, plan_of(rows(2)), 2)
    plan = plan_of(rows(2), anchors=tuple(anchors), anchor_ratio=9.0)
    both = gradient(monkeypatch, plan, 2)

    model = make_model()
    ids = torch.tensor([sequence.token_ids for sequence in answers])
    logits = model(input_ids=ids).logits[:, :-1].flatten(0, 1)
    (KEEP_BASE * kl_of(logits, anchors) / len(logits)).backward()  # type: ignore[no-untyped-call]
    parameters = [each for each in model.parameters() if each.ndim >= 2]
    parameters += [each for each in model.parameters() if each.ndim < 2]  # the optimizer's order
    expected = torch.cat([each.grad.flatten() for each in parameters if each.grad is not None])
    assert expected.abs().max() > 1e-4
    torch.testing.assert_close(both - alone, expected, rtol=1e-3, atol=1e-6)


def anchor(sequence: TokenSequence) -> AnchorTarget:
    """An answer that the base model finds as likely as all others."""
    ids = torch.arange(8).repeat(sequence.num_learned, 1)
    return AnchorTarget(sequence, ids, torch.full(ids.shape, 1 / VOCABULARY).log())


def gradient(monkeypatch: pytest.MonkeyPatch, plan: TrainingPlan, visited: int) -> torch.Tensor:
    """The gradient of the first step."""
    model = make_model()
    gradients = []

    def step(optimizer: torch.optim.Optimizer) -> None:
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        gradients.append(
            torch.cat(
                [
                    torch.zeros(each.numel()) if each.grad is None else each.grad.flatten().clone()
                    for each in parameters
                ]
            )
        )

    settings = TrainSettings(max_grad_norm=1e9, micro_batch_tokens=64)
    progress = TrainingState(streak=[0] * len(plan.sequences), due=[0] * len(plan.sequences))
    with monkeypatch.context() as patched:
        patched.setattr(torch.optim.AdamW, "step", step)
        loop._step(
            loop.Whole(model),
            loop._optimizer(model, settings),
            plan,
            [[index] for index in range(visited)],
            1e-3,
            progress,
            settings,
        )
    return gradients[0]
