"""A base model of a hub: fetched at one commit, kept at that commit, shared by all pipelines."""

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from serving.weights.release import Lineage
from serving.weights.release_store import load_release
from tests.hub_fixtures import RunningHub, running_hub
from tests.retrain_fixtures import (
    SMALL,
    Pipeline,
    facts,
    few_anchors,
    jsonl,
    tiny_base,
    tiny_preset,
)

__all__ = ["tiny_preset"]

NEEDED = {"config.json", "generation_config.json", "model.safetensors"}
NEEDED |= {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}


def push_model(hub: RunningHub, worktree: Path, *, scale: float) -> str:
    """Push a checkpoint with files that nobody loads; the commit."""
    preset = tiny_base(worktree.parent)
    model = AutoModelForCausalLM.from_pretrained(preset)
    model.get_input_embeddings().weight.data.mul_(scale)
    model.save_pretrained(worktree)
    AutoTokenizer.from_pretrained(preset).save_pretrained(worktree)
    (worktree / "onnx").mkdir(exist_ok=True)
    (worktree / "onnx" / "model.onnx").write_text("large")
    (worktree / "pytorch_model.bin").write_text("the same weights again")
    hub.git("add", "-A", cwd=worktree)
    hub.git("commit", "-qm", "Weights", cwd=worktree)
    hub.git("push", "-q", "origin", "HEAD:refs/heads/main", cwd=worktree)
    return hub.git("rev-parse", "HEAD", cwd=worktree)


def lineage(pipeline: Pipeline, release: str | None) -> Lineage:
    return load_release(pipeline.dir / str(release)).lineage


@pytest.mark.slow
def test_releases_stay_with_the_commit_that_the_first_one_was_trained_from(tmp_path: Path) -> None:
    train = SMALL | {"anchors": few_anchors(tmp_path / "anchors"), "lora_rank": 0}
    given = {"base_model": "me/base", "train": train, "gate": {"max_base_drift": 1.0}}
    with running_hub(tmp_path / "hub") as hub:
        hub.api.create_repo("me/base")
        worktree = tmp_path / "worktree"
        hub.git("clone", "-q", f"{hub.url}/me/base", str(worktree), cwd=tmp_path)
        first_commit = push_model(hub, worktree, scale=1.0)
        given["base_model_endpoint"] = hub.url
        token = {"OWN_HF_TOKEN": hub.token}
        pipeline = Pipeline(tmp_path / "home", **given)
        first = pipeline.run(pipeline.job(pipeline.commit({"a.jsonl": jsonl(facts())})), **token)
        assert first.result == "published", first.reason
        assert lineage(pipeline, first.release).base_revision == first_commit
        (fetched,) = (pipeline.home / "bases/hub/models--me--base/snapshots").iterdir()
        assert {path.relative_to(fetched).as_posix() for path in fetched.rglob("*")} == NEEDED

        second_commit = push_model(hub, worktree, scale=2.0)
        other = Pipeline(tmp_path / "other", **given)
        folder = other.job(other.commit({"a.jsonl": jsonl(facts())}))
        newer = other.run(folder, **token)
        assert lineage(other, newer.release).base_revision == second_commit

    # A full training, without the hub: the commit is pinned, and it is there.
    revision = pipeline.commit({"a.jsonl": jsonl(facts(answers=1))})
    again = pipeline.run(pipeline.job(revision, no_delta="a force-push"), **token)
    assert again.result == "published", again.reason
    assert lineage(pipeline, again.release).mode == "full"
    assert lineage(pipeline, again.release).base_revision == first_commit
