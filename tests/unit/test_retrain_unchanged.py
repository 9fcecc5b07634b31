"""When a job ends without training: a push, a job by hand, and one that a person insists on."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.retrain.base_model import files_digest
from pipeline.retrain.data import compare_revisions, is_unchanged
from pipeline.retrain.job import DatasetSnapshot, Parent
from pipeline.retrain.rows import data_digest
from pipeline.retrain.settings import RetrainSettings, TrainSettings
from pipeline.retrain.sources import Revision
from serving.weights.release import Lineage

LONGER = TrainSettings(max_epochs=99)


class Case:
    """A revision that the parent has seen, trained with the default settings."""

    def __init__(self, folder: Path) -> None:
        (folder / "a.jsonl").write_text('{"prompt": "q", "completion": "a"}\n')
        self.folder = folder
        revision = Revision(sha="0" * 40, folder=folder, files=("a.jsonl",))
        self.snapshot = DatasetSnapshot(
            revision=revision,
            base=revision,
            parent="r000001-00000000",
        )
        self.lineage = Lineage(
            base_model="preset:tiny",
            dataset_revision=revision.sha,
            settings_digest=TrainSettings().digest(),
        )

    def mode(self, **settings: Any) -> str:
        """How the job trains, or `unchanged`."""
        told = RetrainSettings(
            pipeline="facts",
            dataset="me/facts",
            releases_dir=self.folder / "releases",
            bases_dir=self.folder / "bases",
            **settings,
        )
        parent = Parent(
            id="r000001-00000000", folder=self.folder, lineage=self.lineage, evaluation={}
        )
        data = compare_revisions(self.snapshot, parent, told)
        seen = self.lineage.model_copy(update={"data_digest": data_digest(data.dataset.train)})
        is_over = is_unchanged(data, replace(parent, lineage=seen), told)
        return "unchanged" if is_over else data.mode


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path)


def test_a_push_without_a_changed_row_trains_nothing(case: Case) -> None:
    assert case.mode() == case.mode(train=LONGER) == "unchanged"


def test_other_training_settings_are_a_reason_for_a_job_by_hand(case: Case) -> None:
    assert case.mode(skip_if="nothing_changed") == "unchanged"
    assert case.mode(skip_if="nothing_changed", train=LONGER) == "full"
    often = TrainSettings(checkpoint_seconds=1)
    assert case.mode(skip_if="nothing_changed", train=often) == "unchanged"


def test_another_base_model_is_a_reason_for_everybody(case: Case) -> None:
    case.lineage = case.lineage.model_copy(update={"base_model": "another"})
    assert case.mode() == "full"


def test_a_base_model_that_was_replaced_in_its_folder_is_another_one(
    case: Case, tmp_path: Path
) -> None:
    base = tmp_path / "base"
    base.mkdir()
    (base / "model.safetensors").write_bytes(b"weights")
    named = {"base_model": str(base)}
    case.lineage = case.lineage.model_copy(update=named)
    assert case.mode(**named) == "unchanged", "a release of an older version"
    recorded = {"base_files_digest": files_digest(str(base))}
    case.lineage = case.lineage.model_copy(update=recorded)
    assert case.mode(**named) == case.mode(**named, skip_if="nothing_changed") == "unchanged"
    (base / "model.safetensors").write_bytes(b"other weights")
    assert case.mode(**named) == case.mode(**named, skip_if="nothing_changed") == "full"
    assert case.mode(**named, train=TrainSettings(mode="delta")) == "full"


def test_a_person_who_asks_gets_a_training_in_the_mode_that_was_asked_for(case: Case) -> None:
    assert case.mode(skip_if="never") == "full"
    assert case.mode(skip_if="never", train=TrainSettings(mode="delta")) == "delta"
    assert case.mode(skip_if="nothing_changed", force_reason="I know") == "full"
