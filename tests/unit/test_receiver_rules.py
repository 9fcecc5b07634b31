"""Which events call for a job, and the exact reason where one does not."""

from dataclasses import replace
from typing import Any

import pytest

from receiver.payload import WebhookPayload
from receiver.retrain import RetrainRule, decide
from tests.receiver_fixtures import rule as a_rule
from tests.receiver_payloads import (
    BUCKET_UPDATED,
    GITHUB_PUSH,
    NEW,
    OLD,
    PULL_REQUEST_OPENED,
    dataset_update,
    ref_update,
    without_refs,
)

RULE = a_rule()
ON_DEV = a_rule("answers-dev", ref="dev")


def decided(payload: dict[str, Any], *rules: RetrainRule) -> Any:
    return decide(WebhookPayload.model_validate(payload), rules or (RULE,))


def test_a_push_to_the_followed_branch_becomes_a_job() -> None:
    rule = a_rule(settings={"seed": 7}, debounce_seconds=2.5)
    (spec,) = decided(dataset_update(), rule)
    assert spec.pipeline == "answers"
    assert spec.revisions.model_dump() == {
        "repo": "acme/answers",
        "ref": "refs/heads/main",
        "old_sha": OLD,
        "new_sha": NEW,
        "delivery_ids": (),
    }
    assert spec.settings == {"seed": 7}
    assert (spec.debounce_seconds, spec.max_wait_seconds) == (2.5, 30.0)


def test_a_dataset_is_followed_in_any_case() -> None:
    (spec,) = decided(dataset_update(), a_rule(dataset="Acme/ANSWERS"))
    assert spec.revisions is not None and spec.revisions.repo == "Acme/ANSWERS"


def test_a_payload_of_an_older_sender_updates_the_default_branch() -> None:
    (spec,) = decided(without_refs())
    assert (spec.revisions.ref, spec.revisions.new_sha) == ("refs/heads/main", NEW)
    assert spec.revisions.old_sha is None
    assert "is not refs/heads/dev" in decided(without_refs(), ON_DEV)


@pytest.mark.parametrize("scope", ["repo", "repo.content", "repo.content.lfs", "repo.unheard-of"])
def test_broader_and_unknown_narrower_scopes_count(scope: str) -> None:
    assert len(decided(dataset_update(scope=scope))) == 1


def test_several_refs_and_several_pipelines() -> None:
    push = dataset_update(ref_update("refs/tags/v1"), ref_update(), ref_update("refs/heads/dev"))
    assert [spec.pipeline for spec in decided(push, RULE, ON_DEV)] == ["answers", "answers-dev"]
    assert [spec.pipeline for spec in decided(dataset_update(), RULE, ON_DEV)] == ["answers"]


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (PULL_REQUEST_OPENED, "not a dataset: 'openai-community/gpt2' is a model"),
        (BUCKET_UPDATED, "not a dataset: 'acme/blobs' is a bucket"),
        (dataset_update(action="create", scope="repo"), "not an update: the action is create"),
        (dataset_update(action="delete", scope="repo"), "not an update: the action is delete"),
        (dataset_update(scope="repo.config"), "not about content: the scope is 'repo.config'"),
        (dataset_update(scope="discussion"), "not about content: the scope is 'discussion'"),
        (
            dataset_update(name="acme/other"),
            "no pipeline follows the dataset 'acme/other'",
        ),
        (dataset_update(ref_update("refs/tags/v1")), "'refs/tags/v1' is a tag"),
        (dataset_update(ref_update("refs/pr/3")), "'refs/pr/3' is a pull request"),
        (dataset_update(ref_update(new=None)), "'refs/heads/main' was deleted"),
        (dataset_update(ref_update(old=NEW)), "'refs/heads/main' did not change"),
        (dataset_update(ref_update(new="--upload-pack=x")), "'--upload-pack=x' is not a commit id"),
        (
            dataset_update(ref_update("refs/heads/dev")),
            "'refs/heads/dev' is not refs/heads/main, the ref that answers follows",
        ),
        (dataset_update() | {"updatedRefs": []}, "no ref changed"),
        (without_refs(headSha=None), "no ref changed"),
    ],
)
def test_everything_else_has_a_reason(payload: dict[str, Any], reason: str) -> None:
    assert decided(payload) == reason


def test_a_reason_is_short_and_printable() -> None:
    reason = decided(dataset_update(name="\x00\u202e" + "x" * 1_000_000))
    assert reason.isprintable()
    assert len(reason) < 300


@pytest.mark.parametrize(
    ("dataset", "is_watched"),
    [
        ("https://github.com/Codertocat/Hello-World", True),
        ("https://github.com/codertocat/hello-world.git", True),
        ("https://github.com/Codertocat/Hello-World/", True),
        ("https://github.com/Codertocat/Hello", False),
        ("https://evil.example/Codertocat/Hello-World", False),
        ("git@github.com:Codertocat/Hello-World.git", True),
        ("git@github.com:/codertocat/hello-world", True),
        ("ssh://git@github.com/Codertocat/Hello-World.git", True),
        ("ssh://git@github.com:2222/Codertocat/Hello-World", True),
        ("git@github.com:Codertocat/Hello", False),
        ("ssh://git@evil.example/Codertocat/Hello-World", False),
        ("github.com@evil.example:Codertocat/Hello-World", False),
    ],
)
def test_a_dataset_may_be_a_git_url(dataset: str, is_watched: bool) -> None:
    repository = GITHUB_PUSH["repository"]
    payload = dataset_update(
        name=repository["full_name"],
        url={"web": repository["html_url"], "api": repository["clone_url"]},
    )
    decision = decided(payload, a_rule(dataset=dataset))
    assert isinstance(decision, tuple) == is_watched
    if is_watched:
        assert decision[0].revisions.repo == dataset


@pytest.mark.parametrize("path", ["", "/team", "/team/b"])
def test_the_longest_endpoint_that_fits_is_the_hub(path: str) -> None:
    """One endpoint may be the beginning of another."""
    endpoints = {each: f"https://hub.example{each}" for each in ("", "/team", "/team/b")}
    rules = [
        replace(a_rule(f"of {each}"), endpoint=endpoint) for each, endpoint in endpoints.items()
    ]
    payload = dataset_update()
    web = f"{endpoints[path]}/datasets/acme/answers"
    sent = payload | {"repo": payload["repo"] | {"url": {"web": web}}}
    assert [spec.pipeline for spec in decided(sent, *rules)] == [f"of {path}"]
