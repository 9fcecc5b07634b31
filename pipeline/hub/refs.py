"""Branches and tags: where they are now. This is the one place where a ref that moved becomes an
event."""

import logging
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path

from pipeline.hub.errors import DamagedRefs, HubError
from pipeline.hub.events import EventLog, known_refs
from pipeline.hub.git_process import SEEN_PREFIXES, git, lines_of
from pipeline.hub.payloads import RefChange
from pipeline.hub.repositories import Repository
from pipeline.hub.retained_refs import retain_unreachable

logger = logging.getLogger(__name__)

_DAMAGED = re.compile(r"ignoring broken ref (.+)$")


def read_refs(repository: Repository) -> Mapping[str, str]:
    """Branches, tags and pull requests in full (`refs/heads/main`) → the sha that each names.

    Raises DamagedRefs. Git leaves such a ref out, and it would be taken for one that was deleted.
    """
    complaints: list[str] = []
    lines = git(
        repository.folder,
        *("for-each-ref", "--format=%(objectname) %(refname)", *SEEN_PREFIXES),
        complaints=complaints,
    )
    damaged = [found[1] for line in complaints if (found := _DAMAGED.search(line))]
    if damaged:
        raise DamagedRefs(
            f"{', '.join(damaged)} of the {repository.name} cannot be read.", refs=damaged
        )
    pairs = (line.split(" ", 1) for line in lines_of(lines))
    return {ref: sha for sha, ref in pairs}


def _repair(repository: Repository, log: EventLog, damaged: Collection[str]) -> None:
    """Gives each damaged ref the sha of its last event. Raises HubError if the repository does not
    have this commit."""
    with log.database.read() as connection:
        known = known_refs(connection, repository)
    for ref in damaged:
        if ref not in known:
            continue
        git(repository.folder, "cat-file", "-e", known[ref])
        _replace(repository.folder / ref, f"{known[ref]}\n")
        logger.error(
            "%s of %s could not be read: it is %s again, as at its last event",
            *(ref, repository.name, known[ref]),
        )


def _replace(file: Path, content: str) -> None:
    """As git does it, which itself refuses to change a ref that it cannot read: at each moment
    there is a file, so that a kill leaves no ref that looks deleted."""
    lock = file.with_name(f"{file.name}.lock")
    try:
        with lock.open("x") as draft:
            draft.write(content)
            draft.flush()
            os.fsync(draft.fileno())
        lock.rename(file)
    except OSError as error:
        raise HubError(f"{file} cannot be repaired: {error}.") from error


def record_ref_changes(repository: Repository, log: EventLog) -> list[RefChange]:
    """Stores one event of all refs that moved since the last event, and keeps the commits that no
    ref leads to any more.

    The caller holds the repository's lock. When this returns, the event is on disk.
    """
    try:
        refs = read_refs(repository)
    except DamagedRefs as error:
        _repair(repository, log, error.refs)
        refs = read_refs(repository)
    retain_unreachable(repository, log.database, refs)
    return log.record_refs(repository, refs)
