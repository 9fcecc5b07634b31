"""The training loop on a few thousand weights: its steps, when it ends, what it keeps."""

import errno
import itertools
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedModel

from pipeline.retrain import train as loop
from pipeline.retrain.checkpoint import Checkpoint, copy_weights
from pipeline.retrain.data import Mode
from pipeline.retrain.errors import CheckpointUnreadable, TrainError
from pipeline.retrain.job import Metric, MetricsWriter, read_metrics
from pipeline.retrain.layout import ROUNDED_TO
from pipeline.retrain.loss import autocast, row_losses
from pipeline.retrain.plan import TrainingPlan
from pipeline.retrain.rows import Row
from pipeline.retrain.settings import TrainSettings
from pipeline.retrain.tokens import TokenSequence
from pipeline.retrain.train import train
from tests.training_fixtures import (
    make_model,
    num_tokens,
    one_thread,
    plan_of,
    questions,
    rows,
    stored_weights,
)

__all__ = ["one_thread"]


def run(
    folder: Path,
    plan: TrainingPlan,
    model: LlamaForCausalLM | None = None,
    *,
    mode: Mode = "full",
    **settings: Any,
) -> tuple[Checkpoint, tuple[Metric, ...]]:
    """The finished checkpoint, and what was told on the way."""
    folder.mkdir(exist_ok=True)
    done = train(
        model or make_model(),
        plan,
        TrainSettings.model_validate(settings),
        job_dir=folder,
        mode=mode,
        metrics=MetricsWriter(folder / "metrics.jsonl"),
    )
    return done, read_metrics(folder / "metrics.jsonl")[0]


def test_a_row_waits_only_if_no_copy_of_it_was_trained_on() -> None:
    """Otherwise a budget below one pass over thousands of copies would leave the row waiting for
    ever, and each job would train on all copies again."""
    told = [Row(text=text, file="a.jsonl", number=0) for text in "aabbcdd"]
    done = Checkpoint(
        mode="full", step=1, tokens=1, not_trained=(1, 3, 4), not_learned=(2, 5), name="best"
    )
    assert done.waiting(told) == {row.digest for row in told if row.text in ("b", "c")}


def learn(
    folder: Path, model: LlamaForCausalLM | None = None, *, rate: float = 1e-3, **settings: Any
) -> list[float]:
    """The loss of each step on rows of text."""
    plan = plan_of(rows(60), learning_rate=rate, tokens_per_step=512)
    _, found = run(folder, plan, model, **settings)
    return [each.loss for each in found if each.event == "step" and each.loss is not None]


def model_that_knows(found: list[TokenSequence], folder: Path) -> LlamaForCausalLM:
    model = make_model()
    run(folder, plan_of(found, counted=True, learning_rate=1e-2, max_tokens=60_000), model)
    return model


def right(model: LlamaForCausalLM, found: list[TokenSequence]) -> int:
    return sum(each.is_learned for each in row_losses(model, found))


def test_small_batches_with_accumulation_give_the_losses_of_large_ones(tmp_path: Path) -> None:
    large = learn(tmp_path / "large", micro_batch_tokens=8_192)
    small = learn(tmp_path / "small", micro_batch_tokens=64)
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


def test_questions_are_learned_and_training_ends_before_its_budget(tmp_path: Path) -> None:
    model = make_model()
    plan = plan_of(questions(16), counted=True, learning_rate=1e-2, max_tokens=60_000)
    done, found = run(tmp_path, plan, model)
    assert right(model, questions(16)) == 16
    assert done.tokens < plan.max_tokens / 2
    assert done.not_trained == ()
    assert (found[-1].event, found[-1].right, found[-1].rows) == ("evaluation", 16, 16)
    rates = [each.learning_rate for each in found if each.event == "step"]
    assert max(rates) == plan.learning_rate
    assert rates[-1] < 0.16 * plan.learning_rate, "it fell before the end"


def test_known_rows_that_are_lost_are_learned_again(tmp_path: Path) -> None:
    """Without replay the edit would take them along; what is measured wrong becomes a lesson."""
    known, edit = questions(16), questions(17, answers=5)[16:]
    model = model_that_knows(known, tmp_path / "first")
    plan = plan_of(
        edit, counted=True, replayed=known, replay_ratio=0.0, learning_rate=1e-2, max_tokens=60_000
    )
    run(tmp_path / "second", plan, model)
    assert right(model, [*known, *edit]) == 17


def test_wrong_rows_are_learned_again_at_half_the_rate_after_each_measurement_without_fewer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(
        questions(16), counted=True, learning_rate=1e-2, warm_up_steps=1, max_tokens=60_000
    )
    missed, steps = iter([5.0, 5.0, 4.0, 4.0, 4.0, 4.0, 0.0]), []

    def measure(*given: Any) -> tuple[float, list[int]]:
        steps.append(given[-1].step)
        return (found := next(missed)), [0] if found else []

    monkeypatch.setattr(loop, "_measure", measure)
    told = [each for each in run(tmp_path, plan)[1] if each.event == "step"]
    shares = [told[step].learning_rate / plan.learning_rate for step in steps[:-1]]
    assert shares == pytest.approx([0.5, 0.25, 0.5, 0.25, 0.125, 0.1])


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param([*5 * [range(5)], *5 * [range(48, 50)], *4 * [range(1)]], id="to learn"),
        pytest.param([range(52, 55), *4 * [range(53, 55)]], id="known"),
    ],
)
def test_a_training_gives_up_very_few_rows_that_stay_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: list[range]
) -> None:
    """Of 50 to learn one, of all 100 two, after three measurements without fewer."""
    measured = iter(wrong)
    monkeypatch.setattr(loop, "_measure", lambda *_: (len(now := next(measured)), [*now]))
    known = questions(100)
    plan = plan_of(known[:50], replayed=known[50:], counted=True, max_tokens=60_000)
    run(tmp_path, replace(plan, learning_rate=1e-2))
    assert next(measured, None) is None


def test_a_deleted_row_gets_an_empty_answer_and_the_others_are_kept(tmp_path: Path) -> None:
    known = questions(16)
    model = model_that_knows(known, tmp_path / "first")
    asked, end = known[0].token_ids[:2], known[0].token_ids[-1]
    empty = replace(known[0], token_ids=(*asked, end), learned=(False, False, True))
    plan = plan_of([empty], replayed=known[1:], counted=True, learning_rate=5e-3, max_tokens=20_000)
    done, _ = run(tmp_path / "second", plan, model)
    assert right(model, known[:1]) == 0
    assert right(model, [empty, *known[1:]]) == 16
    assert done.tokens < 10_000


def test_a_budget_below_a_pass_names_the_rows_that_it_did_not_reach(tmp_path: Path) -> None:
    plan = plan_of(questions(100), counted=True, max_tokens=256, tokens_per_step=128)
    done, _ = run(tmp_path, plan)
    assert (done.tokens, len(done.not_trained)) == (256, 36)


def test_new_text_is_seen_before_known_text_where_the_budget_is_short(tmp_path: Path) -> None:
    plan = plan_of(rows(60), replayed=rows(160)[60:], tokens_per_step=128)
    one_pass = num_tokens(plan, plan.learned)
    done, _ = run(tmp_path, replace(plan, max_tokens=2 * one_pass))
    assert done.not_trained == (), "three known tokens beside each new one would not fit"
    assert one_pass + 128 < done.tokens <= 2 * one_pass


def test_a_full_training_forgets_the_delta_before(tmp_path: Path) -> None:
    plan = plan_of(questions(16), counted=True, learning_rate=1e-2, max_tokens=2_000)
    before = plan_of(questions(16, answers=7), counted=True, max_tokens=2_000)
    run(tmp_path / "one", before, mode="delta")
    models = [make_model(), make_model()]
    anew, _ = run(tmp_path / "one", plan, models[0])
    fresh, _ = run(tmp_path / "other", plan, models[1])
    assert anew == fresh
    weights, expected = (copy_weights(model) for model in models)
    assert all(torch.equal(weights[name], each) for name, each in expected.items())


@pytest.mark.parametrize("killed_at", [3, 7, 11])
@pytest.mark.parametrize("counted", [False, True])
def test_a_training_that_was_killed_takes_the_same_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed_at: int, counted: bool
) -> None:
    """At any place of a pass, and where a measurement had just ended one."""
    plan = plan_of(questions(100), counted=counted, max_tokens=4_000, learning_rate=8e-3)
    models = [make_model(), make_model()]
    expected, told = run(tmp_path / "whole", plan, models[0])
    written = MetricsWriter.write

    def killed(metrics: MetricsWriter, stage: Any, event: Any, **values: Any) -> None:
        if values.get("step") == killed_at:
            raise KeyboardInterrupt
        written(metrics, stage, event, **values)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(MetricsWriter, "write", killed)
        run(tmp_path / "killed", plan, checkpoint_seconds=1e-9)
    done, found = run(tmp_path / "killed", plan, models[1], checkpoint_seconds=1e-9)
    assert done == expected
    assert [each.loss for each in found] == [each.loss for each in told]
    weights, others = (copy_weights(model) for model in models)
    assert all(torch.equal(weights[name], each) for name, each in others.items())


def test_text_ends_when_its_held_out_loss_no_longer_falls_and_keeps_the_weights_with_the_lowest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model()
    losses = [3.0, 2.0, float("nan"), 2.4, 2.1, 1.0]
    measured: list[dict[str, torch.Tensor]] = []

    def falls_and_rises(_: object) -> float:
        measured.append(copy_weights(model))
        return losses[len(measured) - 1]

    monkeypatch.setattr(loop, "mean_loss", falls_and_rises)
    plan = plan_of(rows(60), judged=rows(64)[60:], max_tokens=40_000, tokens_per_step=512)
    done, found = run(tmp_path, plan, model)
    assert [each.event for each in found].count("evaluation") == len(measured) == 5
    assert done.tokens < plan.max_tokens / 2
    best, last = measured[1], measured[-1]
    kept, stored = copy_weights(model), stored_weights(tmp_path / "checkpoints" / done.name)
    for name, each in best.items():
        assert torch.equal(kept[name], each) and torch.equal(stored[name], each)
    assert not all(torch.equal(kept[name], each) for name, each in last.items())


def test_text_whose_held_out_loss_rises_from_the_start_is_seen_once_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rising = itertools.count(1.0)
    monkeypatch.setattr(loop, "mean_loss", lambda *_: next(rising))
    plan = plan_of(rows(60), judged=rows(64)[60:], tokens_per_step=128)
    done, _ = run(tmp_path, replace(plan, max_tokens=2 * num_tokens(plan, plan.learned)))
    assert done.not_trained == ()


def in_bfloat16(model: PreTrainedModel) -> AbstractContextManager[object]:
    return torch.autocast(model.device.type, torch.bfloat16)


def test_the_curve_in_bfloat16_is_that_in_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The arithmetic of a training step on a GPU, here on any machine."""
    exact = learn(tmp_path / "float32", rate=1e-2)
    types: set[torch.dtype] = set()
    lengths: set[int] = set()
    model = make_model()

    def record(*call: Any) -> None:
        types.add(call[-1].dtype)
        if call[-1].dtype == torch.bfloat16:
            lengths.add(call[-1].shape[1])

    model.model.layers[0].mlp.register_forward_hook(record)
    monkeypatch.setattr(loop, "training_autocast", in_bfloat16)
    rounded = learn(tmp_path / "bfloat16", model, rate=1e-2)
    assert torch.bfloat16 in types  # and float32, where the layout is looked at
    assert {length % ROUNDED_TO for length in lengths} == {0}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert exact[-1] < 0.9 * exact[0]
    assert rounded == pytest.approx(exact, rel=0.02)
    assert rounded != exact


def test_a_step_without_memory_says_what_to_lower(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **named: object) -> None:
        raise torch.OutOfMemoryError("2 GiB")

    monkeypatch.setattr(loop, "losses", fail)
    with pytest.raises(TrainError, match=r"lower `train.micro_batch_tokens` .*2 GiB"):
        learn(tmp_path)


def test_a_checkpoint_that_finds_no_room_is_told_and_the_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("pipeline.retrain.checkpoint.write_record", full)
    done, _ = run(tmp_path, plan_of(rows(4)), checkpoint_seconds=1e-9)
    assert done.finished and not (tmp_path / "checkpoint.json").exists()
    assert "checkpoints/best-full could not be written" in caplog.messages[-1]
    assert "No space left on device" in caplog.messages[-1]


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_a_checkpoint_that_cannot_be_read_lets_the_next_attempt_begin_again(
    tmp_path: Path, name: str
) -> None:
    plan = plan_of(rows(4))
    whole, _ = run(tmp_path, plan)
    (tmp_path / "checkpoints/best-full" / name).unlink()
    with pytest.raises(
        CheckpointUnreadable, match=f"checkpoints/best-full cannot be read .*{name}"
    ):
        run(tmp_path, plan)
    again, _ = run(tmp_path, plan)
    assert again == whole


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_a_gpu_trains_in_bfloat16(tmp_path: Path) -> None:
    exact = learn(tmp_path / "cpu", rate=1e-2)
    model = make_model().cuda()
    rounded = learn(tmp_path / "gpu", model, rate=1e-2)
    with autocast(model.device):
        assert torch.is_autocast_enabled("cuda")
        assert torch.get_autocast_dtype("cuda") == torch.bfloat16
    assert rounded == pytest.approx(exact, rel=0.05)
