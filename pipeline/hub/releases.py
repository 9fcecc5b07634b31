"""Shows each release of a pipeline as a revision of the model repository `<owner>/<pipeline>`: its
tag is the release's id, and `main` is the served release. Also makes a release of a commit that a
client uploaded.

The folders of the releases are the truth, and the refs follow them. So if a person moves `main` or
the tag of a removed release, the next look puts it back.

A large file of a release is on the disk once: its folder and the repository each have a name (a
hard link) for it. This is safe because nothing ever writes to such a file again: whoever removes
one of the names leaves the other one.

The commit of a release has no parent. With one, the history of each release would keep the large
files of all the releases before it.
"""

import logging
import math
import os
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from sqlalchemy import select
from starlette.concurrency import run_in_threadpool

from jobs.job import Job
from jobs.spec import DEFAULT_BRANCH
from pipeline.formats import Pointer
from pipeline.hub.commits import MAX_GIT_BYTES, Change, first_commit, import_commit
from pipeline.hub.contents import (
    ATTRIBUTES_FILE,
    NEW_REPOSITORY,
    list_tree,
    look_up,
    read_file,
    resolve_revision,
    tracking_line,
)
from pipeline.hub.database import events
from pipeline.hub.errors import Conflict, HubError, RepositoryNotFound
from pipeline.hub.events import EventLog, create_repository, record_ref_changes
from pipeline.hub.garbage import sweep
from pipeline.hub.git import NO_REF, Signature, git
from pipeline.hub.large_files import LargeFiles
from pipeline.hub.repositories import (
    Repositories,
    Repository,
    RepositoryName,
    known_refs,
    read_refs,
    repository_name,
)
from serving.errors import ReleaseError
from serving.weights.publish import adopt_release
from serving.weights.release import RELEASE_FILE, RELEASE_ID, Release, parse
from serving.weights.release_store import load_release, read_served, release_ids
from serving.weights.verify import check_files

logger = logging.getLogger(__name__)

NUM_EVENTS = 100
"""How many events of a model repository are looked at, to see what was served when."""
_TAGS = "refs/tags/"
_ATTEMPTS = re.compile(r"refs/heads/attempts/(j\d+)-(\d{1,9})", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Releases:
    repositories: Repositories
    log: EventLog
    owner: str
    """Who owns the model repositories."""
    pipeline_dirs: Mapping[str, Path]
    """The folder of each pipeline's releases, by the pipeline's name."""
    running_job: Callable[[str, int], Job | None]
    """Returns the job of this id, if this attempt of it runs."""
    problems: dict[Path, str] = field(default_factory=dict)
    """Why the last `sync_releases` could not show this release, or any release of this pipeline.
    Requests do not try these again, because each would need time for it."""

    def name(self, pipeline: str) -> RepositoryName:
        return repository_name("model", self.owner, pipeline)


def record_release(repository: Repository, *, pipeline: str, folder: Path) -> str:
    """Makes the commit and the tag of the release in `folder`, and returns the commit's sha. If the
    tag exists, only returns the sha.

    Takes the sha256 of the large files from the manifest, and does not read the files. The caller
    holds the repository's lock, and calls `record_ref_changes` afterwards. Raises ReleaseError if
    the release is damaged, OSError if it is being removed, and DiskFull.
    """
    tag = f"{_TAGS}{folder.name}"
    if (known := read_refs(repository).get(tag)) is not None:
        return known
    release = load_release(folder)
    if reasons := check_files(folder, release):
        raise ReleaseError(*reasons)
    changes = [Change(path=RELEASE_FILE, read=(folder / RELEASE_FILE).read_bytes)]
    attributes = NEW_REPOSITORY
    for name, entry in release.files.items():
        read = (folder / name).read_bytes
        if (is_shard := name.endswith(".safetensors")) or entry.size > MAX_GIT_BYTES:
            LargeFiles(repository.folder).link(folder / name, entry.sha256, entry.size)
            read = Pointer(oid=entry.sha256, size=entry.size).render
            attributes += "" if is_shard else tracking_line(name)
        changes.append(Change(path=name, read=read))
    changes.append(Change(path=ATTRIBUTES_FILE, read=attributes.encode))
    message = f"Release {release.id} of {pipeline}\n"
    commit = import_commit(repository, None, message, _author(repository.name), changes)
    git(repository.folder, "update-ref", tag, commit, NO_REF)
    return commit


def record_served(repository: Repository, release: str | None) -> None:
    """Moves `main` to the release. If None is served, `main` is a commit without a release, from
    which a client can begin a branch. The caller does as for `record_release`. Raises
    RevisionNotFound if the release has no tag."""
    main = read_refs(repository).get(DEFAULT_BRANCH)
    if release is not None:
        commit = resolve_revision(repository, f"{_TAGS}{release}")
        if commit != main:
            git(repository.folder, "update-ref", DEFAULT_BRANCH, commit)
            logger.info("main of %s is now %s", repository.name, release)
    elif main is None or look_up(repository, [f"{main}:{RELEASE_FILE}"]) != [None]:
        git(repository.folder, "update-ref", "-d", DEFAULT_BRANCH)
        first_commit(repository, _author(repository.name))


def served_when(releases: Releases, pipeline: str) -> list[tuple[float, str]]:
    """When which release began to be served, newest first, as far as the events tell. Only those
    that still exist."""
    try:
        repository = releases.repositories.find(releases.name(pipeline))
    except RepositoryNotFound:
        return []
    moves = select(events.c.created_at, events.c.updated_refs).order_by(events.c.seq.desc())
    of_repository = moves.where(events.c.repository_id == repository.id).limit(NUM_EVENTS)
    with releases.log.database.read() as connection:
        ids = {sha: name for name, sha in _releases_in(known_refs(connection, repository)).items()}
        rows = connection.execute(of_repository).all()
    return [
        (row.created_at, ids[each["new_sha"]])
        for row in rows
        for each in row.updated_refs
        if each["ref"] == DEFAULT_BRANCH and each["new_sha"] in ids
    ]


async def sync_releases(releases: Releases) -> None:
    """Makes the refs of each pipeline's model repository as its folder is: a tag for each release
    that is not damaged, none for a removed release, and `main` at the served one. What only a
    removed release needs is removed at once, because releases are large, and a purge must leave
    nothing of them. Logs a problem, once, and raises no error."""
    for pipeline in releases.pipeline_dirs:
        await _sync(releases, pipeline)


async def refresh(releases: Releases, name: RepositoryName) -> None:
    """What `sync_releases` does, for one repository, if something has changed since. Called before
    a client reads the repository, so that it finds a release that was published a moment ago."""
    if name.type != "model" or name.owner.lower() != releases.owner.lower():
        return
    for pipeline in releases.pipeline_dirs:
        is_asked_for = pipeline.lower() == name.name.lower()
        if is_asked_for and not await run_in_threadpool(_is_current, releases, pipeline):
            await _sync(releases, pipeline)


def branch_of(job_id: str, attempt: int | str) -> str:
    """The branch to which an attempt elsewhere uploads its release. It is removed after the end of
    the attempt."""
    return f"attempts/{job_id}-{attempt}"


def take_release(releases: Releases, *, pipeline: str, revision: str) -> Path:
    """Makes a release of the files that a client uploaded to `revision` of the pipeline's model
    repository, usually a branch `attempts/…`, and returns its folder. The release gets a new
    number, so its id is the folder's name. A repeated call returns the same folder.

    It may take long, because it reads all files. Raises ReleaseError with all reasons if this is no
    whole release, RepositoryNotFound, RevisionNotFound and NotEnoughSpace.
    """
    repository = releases.repositories.find(releases.name(pipeline))
    commit = resolve_revision(repository, revision)
    entries = {each.path: each for each in list_tree(repository, commit, recursive=False)}

    def put_file(name: str, path: Path) -> None:
        entry = entries.get(name)
        if entry is None or entry.type != "file":
            return
        if entry.lfs is None:
            with path.open("wb") as file:
                git(repository.folder, "cat-file", "blob", entry.oid, into=file)
            return
        source = LargeFiles(repository.folder).path(entry.lfs.oid)
        try:
            os.link(source, path)
        except FileNotFoundError:  # the client never sent it
            return
        except OSError:
            shutil.copyfile(source, path)

    manifest = entries.get(RELEASE_FILE)
    if manifest is None:
        raise ReleaseError(f"{RELEASE_FILE}: missing in {revision} of the {repository.name}")
    release = parse(Release, read_file(repository, manifest), RELEASE_FILE)
    return adopt_release(releases.pipeline_dirs[pipeline], release, put_file)


async def _sync(releases: Releases, pipeline: str) -> None:
    folder = releases.pipeline_dirs[pipeline]
    try:
        find = partial(releases.repositories.find, releases.name(pipeline))
        await run_in_threadpool(_create_if_needed, releases, pipeline)
        with suppress(RepositoryNotFound):  # there was no release yet
            async with releases.repositories.locked(find) as repository:
                await run_in_threadpool(_sync_locked, releases, pipeline, repository)
        releases.problems.pop(folder, None)
    except Exception as error:
        # The next time may succeed: the usual causes are a full disk and a locked database.
        _complain(releases, folder, error)


def _create_if_needed(releases: Releases, pipeline: str) -> None:
    name = releases.name(pipeline)
    try:
        releases.repositories.find(name)
    except RepositoryNotFound:
        if release_ids(releases.pipeline_dirs[pipeline]):
            with suppress(Conflict):  # another request was faster
                create_repository(releases.repositories, releases.log, name, _author(name))


def _sync_locked(releases: Releases, pipeline: str, repository: Repository) -> None:
    folder = releases.pipeline_dirs[pipeline]
    refs = read_refs(repository)
    _check_is_ours(repository, refs)
    present = release_ids(folder)
    for path in [each for each in releases.problems if each.parent == folder]:
        if path.name not in present:
            del releases.problems[path]
    for release_id in present:
        path = folder / release_id
        try:
            record_release(repository, pipeline=pipeline, folder=path)
            releases.problems.pop(path, None)
        except (ReleaseError, OSError) as error:
            if path.is_dir():
                _complain(releases, path, error)
    removed = _releases_in(refs).keys() - set(present)
    for release_id in removed:
        git(repository.folder, "update-ref", "-d", f"{_TAGS}{release_id}")
    uploads = [
        ref
        for ref in refs
        if (found := _ATTEMPTS.fullmatch(ref)) and not releases.running_job(found[1], int(found[2]))
    ]
    for ref in uploads:
        git(repository.folder, "update-ref", "-d", ref)
    served = read_served(folder).release
    if served is None or served in _releases_in(read_refs(repository)):
        record_served(repository, served)
    record_ref_changes(repository, releases.log)
    if removed or uploads:
        # The files of an upload stay, however long it has taken until now.
        sweep(repository, (), grace_seconds=math.inf, new_files_stay=False)


def _check_is_ours(repository: Repository, refs: Mapping[str, str]) -> None:
    """Raises HubError if the repository was there before it had releases, so that `main` is not
    taken from the person who made it."""
    main = refs.get(DEFAULT_BRANCH)
    if main is None or _releases_in(refs):
        return
    files = {each.path for each in list_tree(repository, main, recursive=False)}
    if files - {ATTRIBUTES_FILE} and RELEASE_FILE not in files:
        raise HubError(
            f"the {repository.name} has files of somebody, so it cannot show the releases of the "
            f"pipeline with this name: move it away with `hf repos move {repository.name.id} "
            f"{repository.name.id}-base`, or rename the pipeline"
        )


def _is_current(releases: Releases, pipeline: str) -> bool:
    """Whether the refs are as the folder is, as far as the last event tells. Starts no process."""
    folder, problems = releases.pipeline_dirs[pipeline], releases.problems
    if folder in problems:
        return True
    present = {each for each in release_ids(folder) if folder / each not in problems}
    try:
        repository = releases.repositories.find(releases.name(pipeline))
        served = read_served(folder).release
    except RepositoryNotFound:
        return not present
    except (HubError, ReleaseError, OSError):
        return False
    with releases.log.database.read() as connection:
        refs = known_refs(connection, repository)
    tags, main = _releases_in(refs), refs.get(DEFAULT_BRANCH)
    is_main_right = main not in tags.values() if served is None else main == tags.get(served, main)
    return tags.keys() == present and is_main_right


def _releases_in(refs: Mapping[str, str]) -> dict[str, str]:
    """The commit of each release that has a tag, by the release's id."""
    named = {ref.removeprefix(_TAGS): sha for ref, sha in refs.items() if ref.startswith(_TAGS)}
    return {name: sha for name, sha in named.items() if RELEASE_ID.fullmatch(name)}


def _complain(releases: Releases, path: Path, error: Exception) -> None:
    if releases.problems.get(path) != str(error):
        is_known = isinstance(error, HubError | ReleaseError | OSError)
        logger.error("the hub cannot show %s: %s", path, error, exc_info=not is_known)
    releases.problems[path] = str(error)


def _author(name: RepositoryName) -> Signature:
    return Signature(name=name.owner, email=f"{name.owner}@localhost")
