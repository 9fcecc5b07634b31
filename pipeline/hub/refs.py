"""Reads where the branches, tags and pull requests of a repository are now, and turns every change
into an event. No other module does this for refs."""

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
    """The sha of each branch, tag and pull request, by its full name such as `refs/heads/main`.

    Raises DamagedRefs if git cannot read a ref. Git leaves this ref out of its list, so the hub
    would otherwise record that it was deleted.
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
            f"Git cannot read {', '.join(damaged)} of the {repository.name}: restore the files "
            "of these refs from a backup.",
            refs=damaged,
        )
    pairs = (line.split(" ", 1) for line in lines_of(lines))
    return {ref: sha for sha, ref in pairs}


def _repair(repository: Repository, log: EventLog, damaged: Collection[str]) -> None:
    """Sets each damaged ref to the commit that it had at its last event. Leaves a ref without any
    event as it is. Raises HubError if the repository does not have this commit."""
    with log.database.read() as connection:
        known = known_refs(connection, repository)
    for ref in damaged:
        if ref not in known:
            continue
        git(repository.folder, "cat-file", "-e", known[ref])
        _replace(repository.folder / ref, f"{known[ref]}\n")
        logger.error(
            "git could not read %s of %s: the hub has set it to %s, its commit at the last event",
            *(ref, repository.name, known[ref]),
        )


def _replace(file: Path, content: str) -> None:
    """Writes the file of a ref as git would: into a lock file that is then renamed. The ref has a
    file at every moment, so a kill does not leave a ref that looks deleted. Git itself refuses to
    change a ref that it cannot read."""
    lock = file.with_name(f"{file.name}.lock")
    try:
        with lock.open("x") as draft:
            draft.write(content)
            draft.flush()
            os.fsync(draft.fileno())
        lock.rename(file)
    except OSError as error:
        raise HubError(f"The ref in {file} cannot be repaired: {error}.") from error


def record_ref_changes(repository: Repository, log: EventLog) -> list[RefChange]:
    """Stores one event with all refs that changed since the last event, and returns these changes.
    Keeps the commits that no ref leads to any more (`retained_refs.py`).

    The caller holds the repository's lock. When this returns, the event is on disk.
    """
    try:
        refs = read_refs(repository)
    except DamagedRefs as error:
        _repair(repository, log, error.refs)
        refs = read_refs(repository)
    retain_unreachable(repository, log.database, refs)
    return log.record_refs(repository, refs)
