"""Reads the head (the newest commit) of the ref that a pipeline follows: from the API of the hub
that has the dataset, or with `git ls-remote`."""

import logging
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx

from jobs.errors import HeadAway, NoHead
from jobs.job import FindHead, Head, Job
from jobs.spec import RevisionRange
from pipeline.retrain.errors import HubAway, SnapshotError
from pipeline.retrain.settings import is_git_url
from pipeline.retrain.sources import OVERLOADED, DatasetHub, GitDataset, own_token
from pipeline.tokens import Tokens
from receiver.rules import DEFAULT_BRANCH

logger = logging.getLogger(__name__)

ASK_SECONDS = 5.0
"""How long to wait for an answer. The runner does nothing else meanwhile."""


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """A dataset, and where it is."""

    name: str
    """`owner/name` on a hub, or a git URL."""
    hub_url: str
    """The hub that has the dataset. Not used for a git URL."""
    token: str | None = field(repr=False)
    if_missing: str
    """The end of the error message for a missing dataset. It says what the user can do."""

    @classmethod
    def of(cls, name: str, other_hub: str | None, own_hub: str, token: str) -> "Dataset":
        """The dataset `name` on the hub `other_hub` or, if that is None, on the stack's own hub,
        which has the URL `own_hub` and the token `token`."""
        if other_hub is None or is_git_url(name):
            missing = "`pipeline up` creates it"
            return cls(name=name, hub_url=own_hub, token=token, if_missing=missing)
        return cls(
            name=name,
            hub_url=other_hub,
            token=own_token(os.environ, token),
            if_missing="or your token may not read it: set HF_TOKEN, or run `hf auth login`",
        )

    def head(self, ref: str) -> str:
        """The commit that `ref` points to. Raises HeadAway, or NoHead if there is no such ref."""
        if is_git_url(self.name):
            try:
                return GitDataset(self.name, Path(os.devnull)).head(ref, ASK_SECONDS)
            except HubAway as error:
                raise HeadAway(str(error)) from error
            except SnapshotError as error:
                raise NoHead(str(error)) from error
        branch = ref.removeprefix("refs/heads/")
        return self._commit(branch, f"has no commit on {branch}; push one")

    def commit(self, revision: str) -> str:
        """The full id of the commit `revision`. For a git URL, this is `revision` itself, without a
        check. Raises HeadAway, or NoHead if there is no such commit."""
        if is_git_url(self.name):
            return revision
        missing = f"has no commit {revision!r}; push this commit, or leave --revision out"
        return self._commit(revision, missing)

    def _commit(self, revision: str, if_missing: str) -> str:
        # The name of a branch may contain a character that would end the URL's path, such as #.
        url = f"{self.hub_url}/api/datasets/{self.name}/revision/{quote(revision, safe='')}"
        headers = {} if self.token is None else {"Authorization": f"Bearer {self.token}"}
        try:
            answer = httpx.get(url, headers=headers, timeout=ASK_SECONDS, follow_redirects=True)
            if answer.status_code in OVERLOADED or answer.status_code >= 500:
                answer.raise_for_status()
            found = answer.json() if answer.is_success else {}
            sha = found.get("sha") if isinstance(found, dict) else None
        except (httpx.HTTPError, ValueError) as error:
            raise HeadAway(
                f"could not ask the hub at {self.hub_url} for {self.name}@{revision}: {error}; "
                "check that this hub is up"
            ) from error
        if isinstance(sha, str):
            return sha
        if answer.is_success or answer.headers.get("X-Error-Code") == "RevisionNotFound":
            raise NoHead(f"dataset {self.name} {if_missing}")
        raise NoHead(f"there is no dataset {self.name} on {self.hub_url}; {self.if_missing}")

    def contains(self, commit: str, head: str, cache_dir: Path) -> bool:
        """Whether `commit` is in the history of `head`. For a dataset on a hub, the hub lists this
        history. For a git URL, git looks into the repository that the jobs of the pipeline have
        fetched into `cache_dir`. False if the history cannot be read."""
        try:
            if is_git_url(self.name):
                return GitDataset(self.name, cache_dir).is_ancestor(commit, head)
            hub = DatasetHub(self.name, cache_dir, self.hub_url, self.token or False)
            return hub.is_ancestor(commit, head)
        except SnapshotError:
            return False

    def push_payload(
        self, revisions: RevisionRange, delivered: dict[str, Any] | None, webhook: str
    ) -> dict[str, Any]:
        """The payload that the hub would send for a push of `revisions`. What does not depend on
        the commit comes from the payload that a hub has `delivered`; without one, the payload names
        `webhook` as its webhook."""
        delivered = delivered or {}
        place = f"datasets/{self.name}"
        repo = delivered.get("repo") or {
            "type": "dataset",
            "name": self.name,
            "id": self.name,
            "private": True,
            "owner": {"id": self.name if is_git_url(self.name) else self.name.partition("/")[0]},
            "url": {"web": self.name}
            if is_git_url(self.name)
            else {"web": f"{self.hub_url}/{place}", "api": f"{self.hub_url}/api/{place}"},
            "headSha": revisions.new_sha,
        }
        if revisions.ref == DEFAULT_BRANCH:
            repo = repo | {"headSha": revisions.new_sha}
        shas = {"oldSha": revisions.old_sha, "newSha": revisions.new_sha}
        moved = {"ref": revisions.ref} | {key: sha for key, sha in shas.items() if sha is not None}
        return {
            "event": {"action": "update", "scope": "repo.content"},
            "repo": repo,
            "webhook": delivered.get("webhook") or {"id": webhook, "version": 3},
            "updatedRefs": [moved],
        }


def dataset_of_job(job: Job, hub_url: str, tokens: Tokens) -> Dataset:
    """The dataset of a job with a range of commits. `hub_url` is the URL of the stack's own hub."""
    assert job.spec.revisions is not None
    other_hub = job.spec.env.get("DATASET_ENDPOINT")
    return Dataset.of(job.spec.revisions.repo, other_hub, hub_url, tokens.hub)


def head_finder(hub_url: str, tokens: Tokens) -> FindHead:
    """The function that reads heads for the job store (`JobStore.claim`)."""

    def find_head(job: Job) -> Head:
        assert job.spec.revisions is not None
        dataset = dataset_of_job(job, hub_url, tokens)
        try:
            sha = dataset.head(job.spec.revisions.ref)
        except HeadAway as away:
            if str(away) != job.waits_for:
                logger.warning("Job %s waits: %s", job.id, away, extra={"job_id": job.id})
            raise
        revisions = job.spec.revisions.model_copy(update={"new_sha": sha})
        webhook = "by-hand" if job.by_hand else "retrain"
        return Head(sha=sha, payload=dataset.push_payload(revisions, job.payload, webhook))

    return find_head
