"""The frozen lower layers, computed once: nothing but the time of a step changes."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pipeline.retrain.loss import AnchorTarget, row_losses
from pipeline.retrain.lowrank import decoder_layers, frozen_trunk
from pipeline.retrain.tokens import TokenSequence
from tests.training_fixtures import one_thread, plan_of
from tests.unit.test_retrain_architectures import (
    PACKED,
    PADDED,
    network,
    rows,
    rows_that_begin_alike,
)

__all__ = ["one_thread"]

CUT = ["LlamaConfig", "Qwen3Config", "MistralConfig", "Gemma3TextConfig", "GPTNeoXConfig"]
WHOLE = {*PADDED, "GPT2Config", "GPTJConfig"}


def anchor(sequence: TokenSequence) -> AnchorTarget:
    size = (sequence.num_learned, 2)
    return AnchorTarget(sequence, torch.zeros(size, dtype=torch.long), torch.zeros(size))


@pytest.mark.parametrize("name", CUT)
def test_the_upper_layers_alone_give_the_same_losses(name: str, tmp_path: Path) -> None:
    model = network(name)
    found = rows_that_begin_alike()
    expected = [each.nats for each in row_losses(model, found)]
    answers = rows()
    of_answers = [each.nats for each in row_losses(model, answers)]
    plan = replace(plan_of(found, counted=True), anchors=[anchor(each) for each in answers])
    embedding, layers = model.get_input_embeddings(), list(decoder_layers(model) or ())
    for _ in range(2):  # the second time the anchors' part comes from the disk
        with frozen_trunk(model, plan, tmp_path) as cut:
            assert cut is not plan
            assert model.get_input_embeddings() is not embedding
            losses = row_losses(model, list(cut.sequences))
            assert [each.nats for each in losses] == pytest.approx(expected, abs=1e-4)
            losses = row_losses(model, [each.sequence for each in cut.anchors])
            assert [each.nats for each in losses] == pytest.approx(of_answers, abs=1e-4)
        assert model.get_input_embeddings() is embedding
        assert list(decoder_layers(model) or ()) == layers
    (cached,) = tmp_path.iterdir()

    # Lower layers of other weights make something else of the anchors.
    with torch.no_grad():
        for parameter in layers[0].parameters():
            parameter.mul_(1.5)
    of_answers = [each.nats for each in row_losses(model, answers)]
    with frozen_trunk(model, plan, tmp_path) as cut:
        losses = row_losses(model, [each.sequence for each in cut.anchors])
        assert [each.nats for each in losses] == pytest.approx(of_answers, abs=1e-4)
    assert list(tmp_path.iterdir()) == [cached]
    cached.write_bytes(b"half a file")
    with frozen_trunk(model, plan, tmp_path) as cut:
        assert cut is not plan


@pytest.mark.parametrize("name", [*PACKED, *PADDED])
def test_every_model_is_cut_or_stays_whole(name: str, tmp_path: Path) -> None:
    model = network(name)
    plan = plan_of(rows(), counted=True)
    expected = [each.nats for each in row_losses(model, rows())]
    with frozen_trunk(model, plan, tmp_path) as cut:
        assert (cut is plan) == (name in WHOLE)
        losses = row_losses(model, list(cut.sequences))
        assert [each.nats for each in losses] == pytest.approx(expected, abs=1e-4)
    assert [each.nats for each in row_losses(model, rows())] == pytest.approx(expected)


def test_a_table_that_would_be_too_large_is_not_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.retrain.lowrank.MAX_TABLE_BYTES", 1_000)
    plan = plan_of(rows(), counted=True)
    with frozen_trunk(network("LlamaConfig"), plan, tmp_path) as same:
        assert same is plan
