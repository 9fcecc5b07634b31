"""A dataset on another hub than the stack's, as its jobs read it. A second embedded hub, with a
token of its own, stands for that hub."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from jobs.spec import JobSpec, RevisionRange
from pipeline.retrain.errors import SnapshotError
from pipeline.retrain.job import RetrainJob
from pipeline.retrain.sources import OWN_TOKEN_SOURCE, DatasetHub
from tests.hub_fixtures import RunningHub, running_hub

DATASET = "ada/answers"


@dataclass(frozen=True, kw_only=True)
class Elsewhere:
    hub: RunningHub
    sha: str

    def token(self, name: str) -> str:
        """A token that reads this dataset and nothing else."""
        made = self.hub.request(
            "POST", f"/api/settings/tokens/{name}", params={"repositories": f"dataset:{DATASET}"}
        )
        return str(made.json()["token"])


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Elsewhere]:
    root = tmp_path_factory.mktemp("elsewhere")
    with running_hub(root, token="hf_of_elsewhere") as hub:
        hub.api.create_repo(DATASET, repo_type="dataset")
        made = hub.api.upload_file(
            path_or_fileobj=b'{"text": "one"}\n',
            path_in_repo="rows.jsonl",
            repo_id=DATASET,
            repo_type="dataset",
        )
        yield Elsewhere(hub=hub, sha=made.oid)


def reader(elsewhere: Elsewhere, cache_dir: Path, token: Any) -> DatasetHub:
    return DatasetHub(
        DATASET,
        cache_dir,
        endpoint=elsewhere.hub.url,
        token=token,
        token_source=OWN_TOKEN_SOURCE,
    )


def test_a_token_that_is_wrong_or_was_revoked_is_named(
    elsewhere: Elsewhere, tmp_path: Path
) -> None:
    revoked = elsewhere.token("revoked")
    reader(elsewhere, tmp_path, revoked).head("refs/heads/main")
    elsewhere.hub.request("DELETE", "/api/settings/tokens/revoked")
    for token in ("hf_wrong", revoked):
        with pytest.raises(SnapshotError) as caught:
            reader(elsewhere, tmp_path, token).download(elsewhere.sha)
        assert str(caught.value) == (
            f"revision {elsewhere.sha} of {DATASET} could not be fetched from"
            f" {elsewhere.hub.url}: there is no such dataset, or HF_TOKEN of the shell that started"
            " the stack, or the token of `hf auth login` is wrong, has expired, or may not read"
            " this dataset (401); `pipeline up` creates datasets only on the stack's own hub"
        )
        assert token not in str(caught.value)


@pytest.mark.parametrize("login", [None, "hf_of_the_login"])
def test_a_job_sends_the_users_token_to_the_other_hub_and_never_the_stacks(
    elsewhere: Elsewhere, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, login: str | None
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setenv("HF_TOKEN", elsewhere.hub.token)  # as a job has the stack's
    if login is not None:
        (tmp_path / "token").write_text(login)
    spec = JobSpec(
        command=("true",),
        settings={
            "pipeline": "answers",
            "dataset": DATASET,
            "dataset_endpoint": elsewhere.hub.url,
            "releases_dir": str(tmp_path / "releases"),
            "bases_dir": str(tmp_path / "bases"),
        },
        revisions=RevisionRange(repo=DATASET, ref="refs/heads/main", new_sha=elsewhere.sha),
    )
    (tmp_path / "spec.json").write_text(json.dumps(spec.model_dump(mode="json")))
    of_the_stack = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_TOKEN": "hpj_of_the_stack"}

    def head(**more: str) -> str:
        environ = {"JOB_DIR": str(tmp_path), **of_the_stack, **more}
        return RetrainJob.from_environment(environ).source.head("refs/heads/main")

    assert head(OWN_HF_TOKEN=elsewhere.token(f"job-{login}")) == elsewhere.sha
    wrong = "there is none" if login is None else "is wrong, has expired"
    with pytest.raises(SnapshotError, match=wrong):
        head()
