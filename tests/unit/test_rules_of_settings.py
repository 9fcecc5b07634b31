"""From the settings of a pipeline to the jobs of its commits."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from pipeline.paths import Home
from pipeline.runner.submit import retrain_rule
from pipeline.settings import PipelineSettings, Settings, load_settings
from receiver.payload import WebhookPayload
from receiver.retrain import RetrainRule, decide
from tests.receiver_payloads import dataset_update


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PIPELINE_SETTINGS", str(tmp_path / "pipeline.toml"))
    return tmp_path / "pipeline.toml"


def rule_of(file: Path, keys: str) -> RetrainRule:
    """The rule of a pipeline with these keys in its settings file."""
    file.write_text(f'[[pipelines]]\nname = "a"\ndataset = "o/d"\n{keys}\n')
    settings = load_settings()
    return retrain_rule(settings, Home(file.parent), settings.pipeline("a"))


def test_a_trainer_of_ones_own_runs_in_place_of_the_retraining(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")

    def command(keys: str) -> tuple[str, ...]:
        return rule_of(file, keys).spec.command

    assert command('command = ["./train.sh", "fast"]') == (f"{file.parent}/train.sh", "fast")
    assert command('command = ["~/train.sh", "~/x"]') == ("/home/me/train.sh", "~/x")
    assert command('command = ["/bin/sh", "x/y"]') == ("/bin/sh", "x/y")
    assert command('command = ["sh", "x/y"]') == ("sh", "x/y")
    assert command("")[1:] == ("-m", "pipeline.retrain")


def test_a_relative_base_model_is_beside_the_settings(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    (file.parent / "own" / "base").mkdir(parents=True)

    def told(base_model: str) -> object:
        return rule_of(file, f'base_model = "{base_model}"').spec.settings["base_model"]

    assert told("own/base") == told("./own/base") == f"{file.parent}/own/base"
    assert told("~/base") == "/home/me/base"
    assert [told(each) for each in ("me/base", "preset:tiny")] == ["me/base", "preset:tiny"]


def test_a_dataset_of_another_hub_is_told_of_by_that_hub_only(tmp_path: Path) -> None:
    rules = []
    for name, endpoint in (("here", "hub"), ("there", "https://hub.example/")):
        pipeline = PipelineSettings(name=name, dataset="acme/answers", dataset_endpoint=endpoint)
        rules.append(
            retrain_rule(Settings.model_construct(pipelines=(pipeline,)), Home(tmp_path), pipeline)
        )
    assert [rule.spec.settings["dataset_endpoint"] for rule in rules] == [
        "hub",
        "https://hub.example",
    ]
    told = [rule.spec.env.get("DATASET_ENDPOINT", "of the runner") for rule in rules]
    assert told == ["of the runner", "https://hub.example"]

    def told(hub: str, rules: list[RetrainRule]) -> list[str | None] | str:
        payload = dataset_update()
        payload["repo"]["url"] = {"web": f"{hub}/datasets/acme/answers"}
        decided = decide(WebhookPayload.model_validate(payload), rules)
        return decided if isinstance(decided, str) else [spec.pipeline for spec in decided]

    assert told("http://127.0.0.1:8070", rules) == ["here"]
    assert told("https://Hub.example", rules) == ["there"]
    assert told("https://hub.example.org", rules) == ["here"]
    assert told("https://mirror.example", rules[1:]) == (
        "no pipeline follows the dataset 'acme/answers' at"
        " 'https://mirror.example/datasets/acme/answers'; a dataset of the same name is followed by"
        " there (at https://hub.example)"
    )


def test_the_own_hub_by_its_url_is_the_own_hub(tmp_path: Path) -> None:
    own = Settings().hub_url
    pipeline = PipelineSettings(name="a", dataset="o/d", dataset_endpoint=own)
    settings = Settings.model_construct(pipelines=(pipeline,))
    assert settings.datasets_on_hub == ("o/d",)
    assert retrain_rule(settings, Home(tmp_path), pipeline).endpoint is None
    with pytest.raises(ValidationError, match="is a git URL; leave it out"):
        PipelineSettings(name="a", dataset="https://h/o/d", dataset_endpoint="https://hub.example")


def test_relative_files_of_questions_are_beside_the_settings(file: Path) -> None:
    def told(path: str) -> list[object]:
        values = rule_of(file, f'gate.golden = "{path}"\ntrain.anchors = "{path}"').spec.settings
        return [values["gate"]["golden"], values["train"]["anchors"]]

    assert told("own/q.jsonl") == [f"{file.parent}/own/q.jsonl"] * 2
    assert told("/q.jsonl") == ["/q.jsonl"] * 2
