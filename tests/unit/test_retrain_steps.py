"""The training loop on a model of a few thousand weights: accumulation, clipping, when it stops."""

from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pipeline.retrain import train as loop
from pipeline.retrain.checkpoint import Checkpoint
from pipeline.retrain.metrics import MetricsWriter, read_metrics
from pipeline.retrain.packing import batch, pack
from pipeline.retrain.scoring import autocast
from pipeline.retrain.settings import TrainSettings
from pipeline.retrain.tokens import Sequence
from pipeline.retrain.train import Lessons, train

VOCABULARY = 40


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
        )
    )


def rows(count: int, length: int = 30) -> list[Sequence]:
    return [
        Sequence(
            tuple((row * 7 + place) % VOCABULARY for place in range(length)),
            (False, *(True,) * (length - 1)),
            row,
        )
        for row in range(count)
    ]


def learn(
    folder: Path, model: LlamaForCausalLM | None = None, *, rate: float = 1e-3, **settings: object
) -> tuple[Checkpoint, list[float]]:
    """The finished checkpoint, and the loss of each step."""
    folder.mkdir()
    told = TrainSettings.model_validate({"tokens_per_step": 512, "max_epochs": 4.0, **settings})
    lessons = Lessons(
        training=rows(60),
        held_out=[rows(64)[60:]],
        learning_rate=rate,
        max_tokens=told.max_tokens,
        max_epochs=told.max_epochs,
    )
    metrics = MetricsWriter(folder / "metrics.jsonl")
    model = model or make_model()
    done = train(model, lessons, told, job_dir=folder, job_id="j1", metrics=metrics)
    found, _ = read_metrics(folder / "metrics.jsonl")
    return done, [each.loss for each in found if each.event == "step" and each.loss is not None]


def test_small_batches_with_accumulation_give_the_losses_of_large_ones(tmp_path: Path) -> None:
    _, large = learn(tmp_path / "large", micro_batch_tokens=8_192)
    _, small = learn(tmp_path / "small", micro_batch_tokens=64)
    assert len(large) > 8
    assert small == pytest.approx(large, abs=1e-6)
    assert large[-1] < large[0]


def test_long_gradients_are_scaled_down_to_the_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    norms: list[float] = []
    step = torch.optim.AdamW.step

    def watched(optimizer: torch.optim.AdamW) -> None:
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
        norms.append(float(torch.linalg.vector_norm(torch.cat([g.flatten() for g in gradients]))))
        step(optimizer)

    monkeypatch.setattr(torch.optim.AdamW, "step", watched)
    learn(tmp_path / "free", max_grad_norm=1e9)
    free, norms[:] = list(norms), []
    assert min(free) > 0.01
    learn(tmp_path / "clipped", max_grad_norm=0.01)
    assert norms == pytest.approx([0.01] * len(norms), rel=1e-3)


def test_training_stops_when_the_held_out_loss_no_longer_falls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = iter([3.0, 2.0, 2.5, 2.4, 1.0])
    monkeypatch.setattr(loop, "_balanced_loss", lambda *_: next(measured))
    done, losses = learn(tmp_path / "job", patience=2, evaluations=8, max_epochs=8.0)
    assert (done.best_loss, done.finished) == (2.0, True)
    assert done.best_step is not None
    assert done.step == len(losses) == 2 * done.best_step < done.steps
    assert next(measured) == 1.0


def test_training_stops_when_the_rows_are_known_by_heart(tmp_path: Path) -> None:
    done, losses = learn(tmp_path / "job", enough_loss=100.0, evaluations=4)
    assert done.best_step == done.step == len(losses) < done.steps
    whole, _ = learn(tmp_path / "whole", enough_loss=0.0, evaluations=4)
    assert whole.step == whole.steps


@pytest.mark.parametrize(
    ("measured", "best"), [((2.0, float("nan"), 2.5), 2.0), ((float("nan"), 3.0, 2.0), 2.0)]
)
def test_a_loss_that_is_no_number_never_replaces_one_that_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured: tuple[float, ...], best: float
) -> None:
    coming = iter(measured)
    monkeypatch.setattr(loop, "_balanced_loss", lambda *_: next(coming))
    done, _ = learn(tmp_path / "job", evaluations=3, max_epochs=6.0)
    assert done.best_loss == best


def test_labels_are_the_completions_tokens_one_place_earlier() -> None:
    """Of two rows in one block; nothing is predicted across their border, or in the padding."""
    first = Sequence((11, 12, 13, 14), (False, False, True, True), 0)
    second = Sequence((21, 22, 23, 24, 25), (False, False, False, True, True), 1)
    third = Sequence((31, 32), (False, True), 2)
    assert pack([4, 5, 2], 9) == [[0, 1], [2]]
    part = batch([first, second, third], [[0, 1], [2]])
    assert part.token_ids.tolist()[0] == [11, 12, 13, 14, 21, 22, 23, 24, 25]
    assert part.labels.tolist() == [
        [-1, 13, 14, -1, -1, -1, 24, 25, -1],
        [32, *[-1] * 8],
    ]
    assert part.position_ids.tolist()[0] == [0, 1, 2, 3, 0, 1, 2, 3, 4]


def in_bfloat16(device: torch.device) -> AbstractContextManager[object]:
    return torch.autocast(device.type, torch.bfloat16)


def test_the_curve_in_bfloat16_is_that_in_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The arithmetic that `autocast` takes on a GPU, here on whatever computes."""
    _, exact = learn(tmp_path / "float32", rate=1e-2)
    types: set[torch.dtype] = set()
    model = make_model()
    model.model.layers[0].mlp.register_forward_hook(lambda *call: types.add(call[-1].dtype))
    monkeypatch.setattr(loop, "autocast", in_bfloat16)
    _, rounded = learn(tmp_path / "bfloat16", model, rate=1e-2)
    assert torch.bfloat16 in types  # and float32, where held-out rows are measured
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert exact[-1] < 0.9 * exact[0]
    assert rounded == pytest.approx(exact, rel=0.02)
    assert rounded != exact


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_a_gpu_trains_in_bfloat16(tmp_path: Path) -> None:
    _, exact = learn(tmp_path / "cpu", rate=1e-2)
    model = make_model().cuda()
    _, rounded = learn(tmp_path / "gpu", model, rate=1e-2)
    with autocast(model.device):
        assert torch.is_autocast_enabled("cuda")
        assert torch.get_autocast_dtype("cuda") == torch.bfloat16
    assert rounded == pytest.approx(exact, rel=0.05)
