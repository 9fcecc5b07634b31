"""A dataset outside the hub: a push that GitHub would tell of becomes the model that answers. The
git URL of a second hub, with a token of its own, stands for a repository with LFS on GitHub."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import CommitOperationAdd

from tests.hub_fixtures import RunningHub, running_hub
from tests.receiver_payloads import (
    GITEA_PUSH,
    GITHUB_PUSH,
    GITLAB_PUSH,
    ZEROS,
    body_of,
    hmac_hex,
)
from tests.stack_fixtures import Workplace, configure, facts, stack_up, workplace

__all__ = ["workplace"]


def with_login(workplace: Workplace, hub: RunningHub) -> Workplace:
    """The stack's git has a credential helper for this hub."""
    login = {
        name: value
        for name, value in hub.git_env.items()
        if name.startswith(("GIT_CONFIG_", "HUB_TOKEN"))
    }
    return replace(workplace, env={**workplace.env, **login})


def push(hub: RunningHub, files: Mapping[str, bytes]) -> str:
    """The commit. git stores a pointer in the place of each Parquet file."""
    made = hub.api.create_commit(
        "ada/answers",
        [CommitOperationAdd(name, content) for name, content in files.items()],
        commit_message="Rows",
        repo_type="dataset",
    )
    assert made.oid is not None
    [large] = hub.api.get_paths_info(
        "ada/answers", "more.parquet", revision=made.oid, repo_type="dataset"
    )
    assert large.lfs is not None
    return made.oid


def parquet(rows: str) -> bytes:
    table = pa.Table.from_pylist([json.loads(row) for row in rows.splitlines()])
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    return sink.getvalue().to_pybytes()


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[RunningHub]:
    with running_hub(tmp_path / "elsewhere", token="of-elsewhere") as hub:
        hub.api.create_repo("ada/answers", repo_type="dataset")
        yield hub


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
def test_a_push_to_a_repository_elsewhere_is_served(
    workplace: Workplace, elsewhere: RunningHub
) -> None:
    url = f"{elsewhere.url}/datasets/ada/answers"
    sha = push(
        elsewhere,
        {"facts.jsonl": facts(0, 80).encode(), "more.parquet": parquet(facts(80, 90))},
    )
    configure(workplace)
    settings = workplace.folder / "pipeline.toml"
    settings.write_text(settings.read_text().replace('"local/facts"', json.dumps(url)))
    with stack_up(with_login(workplace, elsewhere)):
        secret = json.loads((workplace.home / "tokens.json").read_text())["webhook"]
        retrain = f"{workplace.url('receiver')}/webhooks/retrain"
        repository = {**GITHUB_PUSH["repository"], "clone_url": url}
        body = body_of({**GITHUB_PUSH, "before": ZEROS, "after": sha, "repository": repository})
        headers = {"X-GitHub-Event": "push", "X-GitHub-Delivery": "d1"}
        proof = {"X-Hub-Signature-256": f"sha256={hmac_hex(secret, body)}"}
        answer = httpx.post(f"{retrain}/github", content=body, headers=headers | proof)
        assert answer.status_code == 200, answer.text
        job = promoted(workplace, answer, sha)
        assert job["outcome"]["counts"]["changed"] == 90, "the rows of the Parquet file count"
        completion = httpx.post(
            f"{workplace.url('serving')}/v1/completions",
            json={"model": "facts", "prompt": "Shelf 3 holds", "max_tokens": 4},
            timeout=60,
        )
        assert completion.headers["X-Dataset-Revision"] == sha
        assert workplace.json("status")["pipelines"][0]["dataset"] == url

        again = httpx.post(f"{retrain}/github", content=body, headers=headers | proof)
        assert again.json() == answer.json(), "a delivery that comes twice gets the first answer"

        newer = push(elsewhere, {"facts.jsonl": (facts(0, 80) + facts(90, 100)).encode()})
        pushed = {"before": sha, "after": newer, "ref": "refs/heads/main"}
        repository = {**GITEA_PUSH["repository"], "clone_url": url, "default_branch": "main"}
        body = body_of({**GITEA_PUSH, **pushed, "repository": repository})
        answer = httpx.post(
            f"{retrain}/gitea",
            content=body,
            headers={
                "X-Gitea-Event": "push",
                "X-Gitea-Delivery": "e1",
                "X-Gitea-Signature": hmac_hex(secret, body),
            },
        )
        assert answer.status_code == 200, answer.text
        job = promoted(workplace, answer, newer)
        assert job["spec"]["revisions"]["old_sha"] == sha
        assert job["outcome"]["counts"]["changed"] == 10

        project = {**GITLAB_PUSH["project"], "git_http_url": url, "default_branch": "main"}
        same = httpx.post(
            f"{retrain}/gitlab",
            content=body_of({**GITLAB_PUSH, **pushed, "project": project}),
            headers={
                "X-Gitlab-Event": "Push Hook",
                "X-Gitlab-Event-UUID": "g1",
                "X-Gitlab-Token": secret,
            },
        )
        assert same.status_code == 200, same.text
        told_again = workplace.json("jobs", "wait", same.json()["job"], "--json")
        assert told_again["outcome"]["result"] == "unchanged"
        assert job["id"] in told_again["outcome"]["reason"], (
            "it is trained once, whoever tells of it"
        )


def promoted(workplace: Workplace, answer: httpx.Response, sha: str) -> Any:
    """The job that the answer names."""
    job = workplace.wait_for_job(sha)
    assert (job["id"], job["outcome"]["result"]) == (answer.json()["job"], "promoted"), job
    return job
