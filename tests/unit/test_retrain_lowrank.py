"""Low-rank training: two small factors beside a frozen layer, and a whole model afterwards."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM

from pipeline.retrain.checkpoint import Checkpoint, copy_weights, set_weights
from pipeline.retrain.errors import BaseModelError
from pipeline.retrain.job import MetricsWriter
from pipeline.retrain.loss import predict
from pipeline.retrain.lowrank import SCALE, LowRank, low_rank
from pipeline.retrain.settings import TrainSettings
from pipeline.retrain.tokens import TokenSequence
from pipeline.retrain.train import train
from tests.training_fixtures import make_model, one_thread, plan_of, rows

__all__ = ["one_thread"]

PARTS = (
    *(f"self_attn.{each}_proj" for each in "qkvo"),
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
NAMES = {f"model.layers.0.{part}" for part in PARTS}
IDS = torch.tensor([[1, 2, 3, 4, 5]])
KEPT = [
    TokenSequence(tuple(range(start, start + 20)), (False, *19 * (True,)), start)
    for start in range(1, 20, 3)
]


def logits(model: LlamaForCausalLM) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


@pytest.mark.parametrize("kept", [[], KEPT])
def test_merged_weights_compute_what_the_factors_did(kept: list[TokenSequence]) -> None:
    model = make_model()
    start = copy_weights(model)
    with low_rank(model, 4, 0, kept):
        for name in NAMES:
            wrapped = model.get_submodule(name)
            assert isinstance(wrapped, LowRank)
            torch.nn.init.normal_(wrapped.second, std=0.1)
        beside = logits(model)
    assert type(model.get_submodule(min(NAMES))) is torch.nn.Linear
    torch.testing.assert_close(logits(model), beside, rtol=0, atol=1e-5)
    changed = {
        name for name, each in copy_weights(model).items() if not torch.equal(each, start[name])
    }
    assert changed == {f"{name}.weight" for name in NAMES}


def test_training_hardly_changes_what_the_usual_direction_of_the_inputs_gives() -> None:
    model = make_model()
    model.get_input_embeddings().weight.data[:, 0] = 5  # all texts are large there
    with low_rank(model, 4, 0, KEPT):
        wrapped = model.get_submodule("model.layers.0.self_attn.q_proj")
        assert isinstance(wrapped, LowRank)
        wrapped.second.data.normal_()
        changes = (wrapped.second @ wrapped._first()).detach().norm(dim=0)
        assert changes[0] < changes[1:].min() / 4
        assert wrapped.scale > 2 * SCALE / 4, "the other directions are scaled up in turn"


def test_only_the_rows_of_training_steps_have_noise() -> None:
    model = make_model()
    row = TokenSequence((1, 2, 3, 4, 5), (False, *4 * (True,)), 0)
    anchor = replace(row, token_ids=(1, 2, 6, 7), learned=row.learned[:4], is_noisy=False)

    def hidden() -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            found, _ = predict(model, [[row, anchor]])
        return found[:4], found[4:]

    alone = hidden()
    with low_rank(model, 4, seed=0):
        assert torch.equal(hidden()[0], alone[0])
        model.train()
        of_row, of_anchor = hidden()
        assert not torch.allclose(of_row, alone[0], atol=1e-3)
        torch.testing.assert_close(of_anchor, alone[1])
    model.eval()
    assert torch.equal(hidden()[0], alone[0])


def test_a_tied_output_layer_stays_tied_and_as_it_was() -> None:
    model = make_model(tie_word_embeddings=True)
    embedding = model.get_input_embeddings().weight.detach().clone()
    with low_rank(model, 4, seed=0):
        model.get_submodule(min(NAMES)).second.data.fill_(0.1)
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert torch.equal(model.lm_head.weight, embedding)


def test_a_model_without_linear_layers_is_refused() -> None:
    shape = GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=16)
    refused = pytest.raises(BaseModelError, match=r"GPT2LMHeadModel has no linear layers.*rank = 0")
    with refused, low_rank(GPT2LMHeadModel(shape), 4, seed=0):
        pass


def learned(
    folder: Path, start: dict[str, torch.Tensor], **settings: float
) -> tuple[Checkpoint, dict[str, torch.Tensor]]:
    folder.mkdir(exist_ok=True)
    model = make_model()
    set_weights(model, start)
    told = TrainSettings.model_validate({"tokens_per_step": 64, **settings})
    plan = plan_of(rows(12), learning_rate=1e-2, max_tokens=2_000)
    metrics = MetricsWriter(folder / "metrics.jsonl")
    with low_rank(model, 4, 0, KEPT):
        done = train(model, plan, told, job_dir=folder, mode="full", metrics=metrics)
    return done, copy_weights(model)


def test_a_training_that_was_killed_ends_with_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = copy_weights(make_model())
    expected, weights = learned(tmp_path / "whole", start)
    written = MetricsWriter.write

    def killed(metrics: MetricsWriter, stage: str, event: str, **values: object) -> None:
        if values.get("step") == 9:
            raise KeyboardInterrupt
        written(metrics, stage, event, **values)  # type: ignore[arg-type]

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(MetricsWriter, "write", killed)
        learned(tmp_path / "killed", start, checkpoint_seconds=1e-9)
    done, resumed = learned(tmp_path / "killed", start, checkpoint_seconds=1e-9)
    assert (done.step, done.tokens) == (expected.step, expected.tokens)
    assert done.step > 9
    assert all(torch.equal(resumed[name], each) for name, each in weights.items())
    again, same = learned(tmp_path / "killed", start)
    assert again == done, "a finished training is only loaded"
    assert all(torch.equal(same[name], each) for name, each in weights.items())
