"""A dataset on another hub than the stack's, as its jobs read it. A second embedded hub, with a
token of its own, stands for that hub."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from jobs.spec import JobSpec, RevisionRange
from pipeline.retrain import own_token, snapshot
from pipeline.retrain.errors import SnapshotError
from pipeline.retrain.job import RetrainJob
from pipeline.retrain.snapshot import DatasetHub
from tests.hub_fixtures import RunningHub, running_hub

DATASET = "ada/answers"

# In a process of its own, because `datasets` reads the address of the hub when it is imported.
PUSH = """
import sys
import datasets
rows = {"prompt": [f"Shelf {n} holds" for n in range(90)], "completion": [f" box {n}." for n in range(90)]}
datasets.Dataset.from_dict(rows).push_to_hub(sys.argv[1], num_shards=3)
"""  # noqa: E501


class Counted:
    """Records each request that reaches the hub."""

    def __init__(self) -> None:
        self.requests: list[str] = []

    def around(self, app: ASGIApp) -> ASGIApp:
        async def counting(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http":
                self.requests.append(f"{scope['method']} {scope['path']}")
            await app(scope, receive, send)

        return counting

    def fetched(self) -> list[str]:
        """The files whose content was asked for since the last call, sorted."""
        got = [each for each in self.requests if each.startswith("GET ") and "/resolve/" in each]
        self.requests.clear()
        return sorted(each.rpartition("/resolve/")[2].partition("/")[2] for each in got)


@dataclass(frozen=True, kw_only=True)
class Elsewhere:
    hub: RunningHub
    counted: Counted
    first: str
    """The commit of `push_to_hub`: three shards and the dataset card."""
    second: str
    """One more shard."""

    def token(self, name: str) -> str:
        """A token that reads this dataset and nothing else."""
        made = self.hub.request(
            "POST", f"/api/settings/tokens/{name}", params={"repositories": f"dataset:{DATASET}"}
        )
        return str(made.json()["token"])


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Elsewhere]:
    counted = Counted()
    root = tmp_path_factory.mktemp("elsewhere")
    with running_hub(root / "hub", token="hf_of_elsewhere", around=counted.around) as hub:
        env = {"HF_ENDPOINT": hub.url, "HF_TOKEN": hub.token, "HF_HOME": str(root / "home")}
        done = subprocess.run(
            [sys.executable, "-c", PUSH, DATASET],
            env=os.environ | env,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        first = hub.api.dataset_info(DATASET).sha
        more = pyarrow.table({"prompt": ["Shelf 90 holds"], "completion": [" box 90."]})
        pyarrow.parquet.write_table(more, root / "more.parquet")
        hub.api.upload_file(
            path_or_fileobj=root / "more.parquet",
            path_in_repo="data/train-extra.parquet",
            repo_id=DATASET,
            repo_type="dataset",
        )
        second = hub.api.dataset_info(DATASET).sha
        assert first is not None and second is not None and first != second
        yield Elsewhere(hub=hub, counted=counted, first=first, second=second)


def reader(elsewhere: Elsewhere, cache_dir: Path, token: Any) -> DatasetHub:
    return DatasetHub(
        DATASET,
        cache_dir,
        endpoint=elsewhere.hub.url,
        token=token,
        token_source=own_token.OWN_TOKEN_SOURCE,
    )


def test_only_what_a_commit_changed_is_fetched(elsewhere: Elsewhere, tmp_path: Path) -> None:
    found = reader(elsewhere, tmp_path, elsewhere.token("reader"))
    shards = [f"data/train-0000{n}-of-00003.parquet" for n in range(3)]
    elsewhere.counted.fetched()
    first = found.download(elsewhere.first)
    assert elsewhere.counted.fetched() == ["README.md", *shards]
    # They are large files there, so what git has of them are pointers.
    assert all(pyarrow.parquet.read_table(first.folder / shard).num_rows == 30 for shard in shards)

    second = found.download(elsewhere.second)
    new = "data/train-extra.parquet"
    assert elsewhere.counted.fetched() == [new]
    assert second.files == ("README.md", *shards, new)
    assert found.is_ancestor(elsewhere.first, elsewhere.second)
    elsewhere.counted.fetched()
    found.download(elsewhere.second)
    assert elsewhere.counted.fetched() == []


def test_a_token_that_is_wrong_or_was_revoked_is_named(
    elsewhere: Elsewhere, tmp_path: Path
) -> None:
    revoked = elsewhere.token("revoked")
    reader(elsewhere, tmp_path, revoked).head("refs/heads/main")
    elsewhere.hub.request("DELETE", "/api/settings/tokens/revoked")
    for token in ("hf_wrong", revoked):
        with pytest.raises(SnapshotError) as caught:
            reader(elsewhere, tmp_path, token).download(elsewhere.first)
        assert str(caught.value) == (
            f"revision {elsewhere.first} of {DATASET} could not be fetched from"
            f" {elsewhere.hub.url}: HF_TOKEN of the shell that started the stack, or the token of"
            " `hf auth login` is wrong, has expired, or may not read this dataset (401)"
        )
        assert token not in str(caught.value)


def test_without_a_token_none_is_sent(
    elsewhere: Elsewhere, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", elsewhere.hub.token)  # as a job has the stack's
    with pytest.raises(SnapshotError, match=r"there is none: set HF_TOKEN .* `hf auth login`"):
        reader(elsewhere, tmp_path, False).head("refs/heads/main")


def test_a_hub_that_is_overloaded_is_asked_again(
    elsewhere: Elsewhere, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_refused = 0

    def refusing(app: ASGIApp) -> ASGIApp:
        async def overloaded(scope: Scope, receive: Receive, send: Send) -> None:
            nonlocal num_refused
            if scope["type"] == "http" and num_refused < 2 and "/revision/" in scope["path"]:
                num_refused += 1
                await send({"type": "http.response.start", "status": 503, "headers": []})
                await send({"type": "http.response.body", "body": b""})
                return
            await app(scope, receive, send)

        return overloaded

    monkeypatch.setattr(snapshot, "RETRY_SECONDS", 0.01)
    with running_hub(tmp_path / "hub", around=refusing) as hub:
        hub.api.create_repo(DATASET, repo_type="dataset")
        found = DatasetHub(DATASET, tmp_path / "cache", endpoint=hub.url, token=hub.token)
        taken = snapshot.take_snapshot(found, "refs/heads/main", None, None)
        assert num_refused == 2
        assert taken.revision.sha == hub.api.dataset_info(DATASET).sha


@pytest.mark.parametrize("login", [None, "hf_of_the_login"])
def test_a_job_sends_the_users_token_to_the_other_hub_and_never_the_stacks(
    elsewhere: Elsewhere, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, login: str | None
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))
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
        revisions=RevisionRange(repo=DATASET, ref="refs/heads/main", new_sha=elsewhere.first),
    )
    (tmp_path / "spec.json").write_text(json.dumps(spec.model_dump(mode="json")))
    of_the_stack = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_TOKEN": "hpj_of_the_stack"}

    def head(**more: str) -> str:
        environ = {"JOB_DIR": str(tmp_path), **of_the_stack, **more}
        return RetrainJob.from_environment(environ).hub.head("refs/heads/main")

    assert head(OWN_HF_TOKEN=elsewhere.token(f"job-{login}")) == elsewhere.second
    wrong = "there is none" if login is None else "is wrong, has expired"
    with pytest.raises(SnapshotError, match=wrong):
        head()
