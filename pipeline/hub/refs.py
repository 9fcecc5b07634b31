"""Branches and tags: where they are now. This is the one place where a ref that moved becomes an
event."""

from collections.abc import Mapping

from pipeline.hub.events import EventLog
from pipeline.hub.git_process import SEEN_PREFIXES, git, lines_of
from pipeline.hub.payloads import RefChange
from pipeline.hub.repositories import Repository
from pipeline.hub.retained_refs import retain_unreachable


def read_refs(repository: Repository) -> Mapping[str, str]:
    """Branches, tags and pull requests in full (`refs/heads/main`) → the sha that each names."""
    lines = git(
        repository.folder, "for-each-ref", "--format=%(objectname) %(refname)", *SEEN_PREFIXES
    )
    pairs = (line.split(" ", 1) for line in lines_of(lines))
    return {ref: sha for sha, ref in pairs}


def record_ref_changes(repository: Repository, log: EventLog) -> list[RefChange]:
    """Stores one event of all refs that moved since the last event, and keeps the commits that no
    ref leads to any more.

    The caller holds the repository's lock. When this returns, the event is on disk.
    """
    refs = read_refs(repository)
    retain_unreachable(repository, log.database, refs)
    return log.record_refs(repository, refs)
