"""`DatasetSnapshot`: the dataset revision to train on, and the revision to compare it with, both
downloaded."""

import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

import httpx
from pydantic import BaseModel, ConfigDict

from jobs.temporary_failures import is_temporary
from pipeline.retrain.data_files import NEEDED, is_needed
from pipeline.retrain.errors import HubAway, SnapshotError
from pipeline.retrain.hub_away import is_away
from pipeline.retrain.parent import Parent
from serving.errors import first_line

logger = logging.getLogger(__name__)

PATIENCE_SECONDS = 60.0
"""How long to keep asking if the hub does not answer. A hub that was killed and restarted answers
again within this time."""
RETRY_SECONDS = 1.0


class Revision(BaseModel):
    """One commit of a dataset, downloaded."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    sha: str
    folder: Path
    files: tuple[str, ...]
    """The dataset card, and all files that may hold rows. The paths are relative to `folder`, and
    sorted."""
    others: tuple[str, ...] = ()
    """The other files of the repository. From a hub, they are not downloaded."""

    @classmethod
    def of(cls, sha: str, folder: Path, files: Iterable[str]) -> "Revision":
        """Divide `files`, the paths of all files in the repository, into `files` and `others`."""
        files = sorted(files)
        return cls(
            sha=sha,
            folder=folder,
            files=tuple(file for file in files if is_needed(file)),
            others=tuple(file for file in files if not is_needed(file)),
        )


class DatasetSnapshot(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    dataset: str
    """`owner/name`, or a git URL."""
    ref: str
    revision: Revision
    base: Revision | None = None
    """The revision that the parent release was trained on. None if there is no such revision, if it
    cannot be downloaded, or if it belongs to another dataset."""
    parent: str | None = None
    """The release from which the job continues: the pending release (which waits for a server), or
    else the served one."""
    passed_over: tuple[str, ...] = ()
    """Damaged releases that would otherwise have been the parent. `parent` is the next release that
    is not damaged."""
    no_delta: str | None = None
    """Why the job cannot continue from the parent's weights (a delta). None if it can."""

    @property
    def is_whole(self) -> bool:
        """Whether all downloaded files are still on the disk."""
        revisions = [self.revision] if self.base is None else [self.revision, self.base]
        return all(
            (revision.folder / file).is_file() for revision in revisions for file in revision.files
        )


@dataclass
class DatasetHub:
    """Reads one dataset on a hub."""

    dataset: str
    cache_dir: Path
    """Only the pipeline of this job uses it."""
    endpoint: str | None
    token: str | Literal[False] | None = field(repr=False)
    """False to send none."""
    token_source: str = "HF_TOKEN"
    """Where the token comes from, for error messages."""

    def head(self, ref: str) -> str:
        """The commit that `ref` points to. Raises SnapshotError."""
        from huggingface_hub import HfApi

        with self._translated(f"{ref} of {self.dataset}"):
            info = HfApi(endpoint=self.endpoint, token=self.token).dataset_info(
                self.dataset, revision=ref.removeprefix("refs/heads/")
            )
        if info.sha is None:
            raise SnapshotError(f"{ref} of dataset {self.dataset} has no commit yet; push one")
        return info.sha

    def download(self, sha: str) -> Revision:
        """Download the files of the commit `sha` that a job needs. Files in the cache are not
        downloaded again. Raises SnapshotError."""
        from huggingface_hub import HfApi, snapshot_download
        from huggingface_hub.utils.tqdm import disable_progress_bars

        disable_progress_bars()  # they would fill the job's log
        with self._translated(f"revision {sha} of {self.dataset}"):
            files = HfApi(endpoint=self.endpoint, token=self.token).list_repo_files(
                self.dataset, repo_type="dataset", revision=sha
            )
            folder = Path(
                snapshot_download(
                    self.dataset,
                    repo_type="dataset",
                    revision=sha,
                    cache_dir=self.cache_dir,
                    endpoint=self.endpoint,
                    token=self.token,
                    allow_patterns=list(NEEDED),
                )
            )
        return Revision.of(sha, folder, files)

    def is_ancestor(self, old: str, new: str) -> bool:
        """Whether `old` is in the history of `new`. Reads the history from `new` backwards."""
        with self._translated(f"the history of {new} in {self.dataset}"):
            return old in self._history(new)

    def forget_others(self, *shas: str) -> None:
        """Remove all downloaded revisions except `shas`."""
        from huggingface_hub import CacheNotFound, scan_cache_dir

        try:
            cache = scan_cache_dir(self.cache_dir)
        except CacheNotFound:
            return
        others = {
            revision.commit_hash for repo in cache.repos for revision in repo.revisions
        }.difference(shas)
        if others:
            cache.delete_revisions(*others).execute()

    def _history(self, sha: str) -> Iterator[str]:
        # Do not use HfApi.list_repo_commits: it fetches the whole history before it returns.
        from huggingface_hub import constants
        from huggingface_hub.utils import build_hf_headers, paginate  # type: ignore[attr-defined]

        endpoint = self.endpoint or constants.ENDPOINT
        commits = paginate(
            f"{endpoint}/api/datasets/{self.dataset}/commits/{sha}",
            params={},
            headers=build_hf_headers(token=self.token),
        )
        yield from (commit["id"] for commit in commits)

    @contextmanager
    def _translated(self, what: str) -> Iterator[None]:
        """Turns errors of the hub's client into a SnapshotError or HubAway."""
        import httpx2  # the hub's client raises its errors
        from huggingface_hub.errors import HfHubHTTPError

        try:
            yield
        except (HfHubHTTPError, httpx.HTTPError, httpx2.HTTPError, OSError) as error:
            reason = _reason(error, self.token_source if self.token else None)
            raise (HubAway if is_away(error) else SnapshotError)(
                f"{what} could not be fetched from {self.endpoint or 'huggingface.co'}: {reason}"
            ) from error


class DatasetSource(Protocol):
    """The source of a dataset: `DatasetHub` for a dataset on a hub, or `GitDataset` for a git
    URL."""

    dataset: str

    def head(self, ref: str) -> str: ...
    def download(self, sha: str) -> Revision: ...
    def is_ancestor(self, old: str, new: str) -> bool: ...
    def forget_others(self, *shas: str) -> None: ...


def take_snapshot(
    hub: DatasetSource, ref: str, sha: str | None, parent: Parent | None
) -> DatasetSnapshot:
    """Download the revision to train on, and the revision that the parent release was trained on.

    sha: the commit to train on, or None for the newest commit of `ref`. Raises SnapshotError. If
    the hub does not answer, it is asked again for PATIENCE_SECONDS before this error is raised.
    """
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return _take(hub, ref, sha, parent)
        except HubAway as error:
            if time.monotonic() >= deadline:
                raise
            logger.warning("%s; asking again", error)
            time.sleep(RETRY_SECONDS)


def _take(hub: DatasetSource, ref: str, sha: str | None, parent: Parent | None) -> DatasetSnapshot:
    revision = hub.download(sha or hub.head(ref))
    base, no_delta = _base(hub, revision, parent)
    return DatasetSnapshot(
        dataset=hub.dataset,
        ref=ref,
        revision=revision,
        base=base,
        parent=parent.id if parent is not None else None,
        no_delta=no_delta,
    )


def _base(
    hub: DatasetSource, revision: Revision, parent: Parent | None
) -> tuple[Revision | None, str | None]:
    if parent is None:
        return None, "there is no release to go on from"
    seen = parent.lineage.dataset_revision
    not_trained = f"release {parent.id} was not trained on {hub.dataset}"
    if seen is None:
        return None, not_trained
    if seen == revision.sha:
        return revision, None
    base: Revision | None = None
    try:
        base = hub.download(seen)
    except SnapshotError as error:
        # After a temporary failure, another attempt may reach this revision.
        if isinstance(error, HubAway) or is_temporary(error):
            raise
        logger.info("%s", error)
        problem = "cannot be reached"
    else:
        if hub.is_ancestor(seen, revision.sha):
            return base, None
        problem = "was removed (by a force-push)"
    # A dataset that was renamed has a new name, but the same commits. So compare the commits first.
    if parent.lineage.dataset != hub.dataset:
        return None, not_trained
    return base, f"revision {seen}, which release {parent.id} has seen, {problem}"


def _reason(error: Exception, token_source: str | None) -> str:
    """token_source: None if no token is sent."""
    from huggingface_hub.errors import (
        HfHubHTTPError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if isinstance(error, RevisionNotFoundError):
        return "it has no such revision (was it removed by a force-push?)"
    is_missing = isinstance(error, RepositoryNotFoundError)
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
    if not is_missing and status not in (401, 403):
        return first_line(error)
    if token_source is None:
        return (
            "there is no such dataset, or it cannot be read without a token, and there is none: set"
            " HF_TOKEN in the shell that starts the stack, or run `hf auth login`"
        )
    if is_missing:
        return f"there is no such dataset, or {token_source} may not read it"
    return f"{token_source} is wrong, has expired, or may not read this dataset ({status})"
