"""A purge (`pipeline hub purge`) uses this module to remove what jobs have stored about some
commits of a dataset or of a base model.

Jobs may have stored rows of a dataset in two places in the state folder, and the module finds and
removes both:

- the downloads of the dataset;
- the folders of the jobs that were started for these commits or read them.

The module also overwrites the reasons in the outcomes of these jobs. Of a base model, jobs have
only downloads.

The module finds the releases that were trained on these commits, or from them, but does not remove
any release, and it does not touch the hub's part of the state folder. The hub uses the module too:
`needed_commits` names the commits to keep.
"""

import shutil
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from jobs.folder import SPEC, read_json
from jobs.job import Job
from jobs.store import JobStore
from pipeline.paths import Home
from pipeline.retrain.job import SNAPSHOT
from serving.errors import ReleaseError
from serving.weights.release import Release
from serving.weights.release_store import (
    list_releases,
    load_release,
    release_ids,
    release_lock,
    sweep_locked,
)

PURGED = "Removed when the commit was purged, because the reason could quote rows of the commit."


Key = tuple[str | None, str | None]
"""The name of a pipeline, and the id of one of its releases."""


@dataclass(frozen=True, kw_only=True)
class Traces:
    """What some commits of a dataset or of a base model have left in the state folder."""

    caches: tuple[Path, ...] = ()
    """The downloads of the dataset or of the base model."""
    num_downloads: int = 0
    """How many downloads in `caches` have one of the commits. `caches` also has the other downloads
    of the repository."""
    job_folders: tuple[Path, ...] = ()
    """The folders of the jobs in `job_ids` that still exist, and folders of jobs of an earlier
    database."""
    job_ids: tuple[str, ...] = ()
    """The jobs that were started for one of the commits, or that read rows of one of the commits.
    """
    releases: tuple[Path, ...] = ()
    """The releases that were trained on one of the commits of the dataset, or from one of the
    commits of the base model; and the later releases whose training started from such a release."""
    unreadable: tuple[Path, ...] = ()
    """The releases whose manifest cannot be read. So nobody knows on which commit they were
    trained, and they may have been trained on one of these commits."""


def needed_commits(home: Home, store: JobStore) -> set[str]:
    """The commits that the hub must keep, because a release or an unfinished job names them. Each
    release and each job names the commit that its training uses. If the training compares this
    commit with an earlier commit, the release or job also names the earlier commit."""
    needed = {
        sha
        for folder in sorted(home.releases_dir.glob("*/"))
        for release in list_releases(folder)
        for sha in (release.lineage.dataset_revision, release.lineage.dataset_base_revision)
    }
    for job in _unfinished(store):
        if job.spec.revisions is not None:
            needed |= {job.spec.revisions.old_sha, job.spec.revisions.new_sha}
    return {sha for sha in needed if sha is not None}


def jobs_in_the_way(store: JobStore, type: str, name: str, commits: Collection[str]) -> list[Job]:
    """The jobs that prevent a purge of a repository of this type: every running job that reads the
    dataset or starts from the base model, and every pending or running job for one of the commits.

    `name` is the name of the repository, in lower case.
    """

    def is_in_the_way(job: Job) -> bool:
        if type == "model":
            base_model, _, _ = str(job.spec.settings.get("base_model")).partition("@")
            return job.state == "RUNNING" and base_model.lower() == name
        return (revisions := job.spec.revisions) is not None and (
            (job.state == "RUNNING" and revisions.repo.lower() == name)
            or revisions.new_sha in commits
        )

    # No job reads a Space.
    return [] if type == "space" else [job for job in _unfinished(store) if is_in_the_way(job)]


def find_traces(
    home: Home, store: JobStore, type: str, name: str, commits: Collection[str]
) -> Traces:
    """What these commits of a repository of this type have left in the state folder. Changes
    nothing.

    `name` is the name of the repository: `owner/name` in lower case.
    """
    if type == "space":
        return Traces()
    is_dataset = type == "dataset"
    folders = _job_folders(home, commits) if is_dataset else []
    ids = {folder.name for folder in folders}
    if is_dataset:
        ids |= {job.id for sha in commits for job in store.of_commit(sha)}
    caches = _caches(home, type, name, commits)
    stored, unreadable = _stored_releases(home)
    trained = _trained_on(stored, store.list(), type, commits)
    return Traces(
        caches=tuple(caches),
        num_downloads=sum(_has_commit(each, commits) for each in caches),
        job_folders=tuple(folders),
        job_ids=tuple(sorted(ids)),
        releases=tuple(path for path, each in stored.items() if _key(path, each) in trained),
        unreadable=tuple(unreadable),
    )


def remove_traces(home: Home, traces: Traces, store: JobStore) -> None:
    """Remove the caches and the job folders, and overwrite the reasons in the outcomes of the jobs.
    Removes no release, but removes what an interrupted removal of a release has left.
    If this function is interrupted, call it again."""
    for pipeline_dir in home.releases_dir.glob("*/"):
        # Wait for the lock, because `sweep` does nothing while another process holds it.
        with release_lock(pipeline_dir):
            sweep_locked(pipeline_dir, is_purge=True)
    for path in (*traces.caches, *traces.job_folders):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    store.replace_reasons(traces.job_ids, PURGED)


def _caches(home: Home, type: str, name: str, commits: Collection[str]) -> list[Path]:
    folders = home.snapshots_dir.glob("*/") if type == "dataset" else [home.bases_dir / "hub"]
    known = f"{type}s--{name.replace('/', '--')}"
    return [
        each
        for folder in folders
        for each in folder.glob(f"{type}s--*")
        if each.name.lower() == known or _has_commit(each, commits)
    ]


def _has_commit(download: Path, commits: Collection[str]) -> bool:
    return any((download / "snapshots" / sha).exists() for sha in commits)


def _job_folders(home: Home, commits: Collection[str]) -> list[Path]:
    folders = sorted(home.jobs_dir.glob("j*/"))
    return [each for each in folders if not _commits_of_job(each).isdisjoint(commits)]


def _commits_of_job(job_folder: Path) -> set[str]:
    """The commit for which the job of this folder was started, and the commits whose rows the job
    read. Empty if no file in the folder names a commit."""
    spec = read_json(job_folder / SPEC) or {}
    snapshot = read_json(job_folder / SNAPSHOT) or {}
    commits = [
        (spec.get("revisions") or {}).get("new_sha"),
        *((snapshot.get(key) or {}).get("sha") for key in ("revision", "base")),
    ]
    return {sha for sha in commits if sha is not None}


def _trained_on(
    stored: Mapping[Path, Release], jobs: Collection[Job], type: str, commits: Collection[str]
) -> set[Key]:
    """The keys of `Traces.releases`.

    A release that lies between two others may be gone. So this function also reads which releases
    the jobs made.
    """
    origins: list[tuple[Key, str | None, str | None]] = []
    for path, release in stored.items():
        lineage = release.lineage
        revision = lineage.dataset_revision if type == "dataset" else lineage.base_revision
        origins.append((_key(path, release), lineage.parent, revision))
    for job in jobs:
        if (made := job.outcome) is not None and made.release is not None:
            revision = made.dataset_revision if type == "dataset" else None
            origins.append(((job.spec.pipeline, made.release), made.parent_release, revision))
    children = defaultdict[Key, set[Key]](set)
    for (pipeline, release_id), parent, _ in origins:
        children[pipeline, parent].add((pipeline, release_id))
    found = newly_found = {key for key, _, revision in origins if revision in commits}
    while newly_found:
        newly_found = {child for key in newly_found for child in children[key]} - found
        found = found | newly_found
    return found


def _stored_releases(home: Home) -> tuple[dict[Path, Release], list[Path]]:
    """All releases, and the folders whose manifest cannot be read."""
    stored, unreadable = {}, []
    for pipeline_dir in sorted(home.releases_dir.glob("*/")):
        for path in (pipeline_dir / release_id for release_id in release_ids(pipeline_dir)):
            try:
                stored[path] = load_release(path)
            except ReleaseError:
                unreadable.append(path)
    return stored, unreadable


def _key(path: Path, release: Release) -> Key:
    return path.parent.name, release.id


def _unfinished(store: JobStore) -> list[Job]:
    return [*store.list(state="SCHEDULING"), *store.list(state="RUNNING")]
