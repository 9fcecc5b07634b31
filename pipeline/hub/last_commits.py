"""Finds the commit that last changed each of many paths, in one walk over the history."""

import subprocess
import time
from collections.abc import Generator, Iterable, Mapping
from contextlib import closing

from pipeline.hub.contents import Commit, read_commits
from pipeline.hub.git_process import git_environment
from pipeline.hub.names import parents_of
from pipeline.hub.repositories import Repository

MAX_COMMITS = 50_000
MAX_SECONDS = 10.0
"""A walk ends after this many commits or seconds. A path that did not change in these commits gets
no commit."""
_CHUNK_BYTES = 64 * 1024


def last_commits(repository: Repository, commit: str, paths: Iterable[str]) -> Mapping[str, Commit]:
    """For each file or folder in `paths`, the last commit up to `commit` that changed it. Only
    first parents are followed, so for a change that came with a merge this is the merge."""
    wanted = set(paths)
    shas: dict[str, str] = {}
    deadline = time.monotonic() + MAX_SECONDS
    if wanted:
        with closing(_changes(repository, commit)) as changes:
            for sha, path in changes:
                for changed in wanted.intersection((path, *parents_of(path))):
                    wanted.discard(changed)
                    shas[changed] = sha
                if not wanted or time.monotonic() > deadline:
                    break
    commits = read_commits(repository, sorted(set(shas.values())))
    return {path: commits[sha] for path, sha in shas.items()}


def _changes(repository: Repository, commit: str) -> Generator[tuple[str, str], None, None]:
    """The sha and the path of each change, newest first. Closing the generator ends git."""
    process = subprocess.Popen(
        [
            *("git", f"--git-dir={repository.folder}", "log", "--first-parent", "-m", "-z"),
            # `--raw` prints the modes before each name. Without them, a name could look like a sha.
            *("--raw", "--no-renames", f"--max-count={MAX_COMMITS}", "--format=%H", commit, "--"),
        ],
        env=git_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdout is not None
    with process:
        try:
            sha, rest, is_name = "", b"", False
            while chunk := process.stdout.read(_CHUNK_BYTES):
                *fields, rest = (rest + chunk).split(b"\0")
                for field in fields:
                    if is_name:
                        yield sha, field.decode(errors="replace")
                        is_name = False
                    elif field.lstrip(b"\n").startswith(b":"):
                        is_name = True
                    else:
                        sha = field.strip().decode()
        finally:
            process.kill()
