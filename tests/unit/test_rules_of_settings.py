"""From the settings of a pipeline to the jobs of its commits."""

from pathlib import Path

from jobs.spec import RevisionRange
from pipeline.paths import Home
from pipeline.rules import retrain_rule
from pipeline.settings import PipelineSettings, Settings


def test_a_trainer_of_ones_own_runs_in_place_of_the_retraining(tmp_path: Path) -> None:
    range = RevisionRange(repo="o/d", ref="refs/heads/main", new_sha="f" * 40)

    def command(own: tuple[str, ...] | None) -> tuple[str, ...]:
        pipeline = PipelineSettings(name="a", dataset="o/d", command=own)
        settings = Settings.model_construct(pipelines=(pipeline,))
        return retrain_rule(settings, Home(tmp_path), pipeline).job_spec(range).command

    assert command(("./train.sh", "fast")) == ("./train.sh", "fast")
    assert command(None)[1:] == ("-m", "pipeline.retrain")
