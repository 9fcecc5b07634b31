"""Fetches dataset revisions from any git repository. Code in the repository is never run.

Logins come from git itself: from a credential helper, or from the SSH keys of this user.

A repository stores large files with Git LFS: in git, such a file is only a pointer, with the hash
and the size of the content. `git lfs` fetches the content.
"""

import errno
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

from pipeline.formats import Pointer, may_be_pointer
from pipeline.retrain.data_files import NEEDED, shown, why_no_data
from pipeline.retrain.errors import HubAway, SnapshotError
from pipeline.retrain.snapshot import Revision

FETCH_SECONDS = 1800.0
AWAY = re.compile(
    "Could not resolve host|no such host|(Failed|unable) to connect"
    "|Connection (refused|reset|closed|timed out)|timed out|timeout|Empty reply from server"
    "|early EOF|error: (429|5\\d\\d)|from HTTP (429|5\\d\\d)",
    re.IGNORECASE,
)
"""What git, `git lfs` and ssh print if the server cannot be reached, or is too busy to answer."""
FULL_DISK = re.compile(
    # If the disk is full, some git commands only say that they could not write a file. If it is not
    # allowed to write the file, git says so in the same line.
    "No space left on device|Out of diskspace|Disk quota exceeded"
    "|(unable|failed) to write(?!.*(Permission denied|Read-only file system))"
)

_LOGIN = re.compile(r"://[^/\s]+@")


class GitDataset:
    """A dataset in a git repository. It has the same methods as `DatasetHub`, which is for datasets
    on a hub. Only this pipeline uses `cache_dir`."""

    def __init__(self, url: str, cache_dir: Path) -> None:
        self.dataset = url
        self._repository = cache_dir / "repository.git"
        self._revisions_dir = cache_dir / "revisions"

    def head(self, ref: str, seconds: float | None = None) -> str:
        """The commit that `ref` points to. Waits at most `seconds` for the answer; None means
        FETCH_SECONDS. Raises SnapshotError."""
        ask = ("ls-remote", "--exit-code", "--", self.dataset, ref)
        listed = self._run(*ask, seconds=seconds)
        if listed.returncode != 0:
            raise self._failed(ref, listed.stderr or "there is no such ref")
        return listed.stdout.split()[0]

    def download(self, sha: str) -> Revision:
        """Download all files of the commit `sha`, including those in Git LFS. Raises
        SnapshotError."""
        folder = self._revisions_dir / sha
        if not folder.is_dir():
            self._fetch(sha)
            self._check_out(sha, folder)
        files = [
            path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()
        ]
        # The records of a job are JSON, which cannot hold a name that is not UTF-8.
        readable = [file for file in files if shown(file) == file]
        for file in sorted(set(files) - set(readable)):
            if why_no_data(file) is None:
                raise SnapshotError(f"{shown(file)}: its name is not UTF-8; rename the file")
        revision = Revision.of(sha, folder, readable)
        self._fill(sha, folder, revision.files)
        return revision

    def is_ancestor(self, old: str, new: str) -> bool:
        """Whether `old` is in the history of `new`. Both commits must be downloaded already."""
        return self._in_repository("merge-base", "--is-ancestor", old, new).returncode == 0

    def forget_others(self, *shas: str) -> None:
        """Remove the files of all downloaded revisions except `shas`."""
        if self._revisions_dir.is_dir():
            for folder in self._revisions_dir.iterdir():
                if folder.name not in shas:
                    shutil.rmtree(folder)
        for content in self._repository.glob("lfs/objects/??/??/*"):
            if content.stat().st_nlink == 1:  # no revision has a link to it any more
                content.unlink()

    def _fill(self, sha: str, folder: Path, files: Iterable[str]) -> None:
        """Replace each pointer of Git LFS among `files` by its content."""
        contents = {
            file: self._repository / "lfs/objects" / oid[:2] / oid[2:4] / oid
            for file in files
            if (oid := _pointed_to(folder / file)) is not None
        }
        missing = [file for file, content in contents.items() if not content.is_file()]
        if missing:
            reason = self._fetch_large_files(sha)
            missing = [file for file in missing if not contents[file].is_file()]
        if missing:
            raise self._failed(f"{missing[0]} is a pointer of Git LFS, and its content", reason)
        for file, content in contents.items():
            _replace(folder / file, content)

    def _fetch_large_files(self, sha: str) -> str:
        """Fetch the content of all files with rows. Returns the first line that `git lfs` printed.

        The repository here is bare and has no HEAD. So `git lfs` reads no `.lfsconfig`, which could
        make this machine connect to any server."""
        if self._run("lfs", "version").returncode != 0:
            raise self._failed(
                "its large files (Git LFS)", "git-lfs is not installed; install git-lfs"
            )
        done = self._in_repository(
            *("-c", f"remote.origin.url={self.dataset}", "-c", "lfs.transfer.maxretries=1"),
            *("lfs", "fetch", f"--include={','.join(NEEDED)}", "--exclude=", "origin", sha),
        )
        return done.stderr.partition("\n")[0]

    def _fetch(self, sha: str) -> None:
        # Run `init` each time: a full disk may have left an incomplete repository. In a complete
        # one, `init` changes nothing.
        self._repository.parent.mkdir(parents=True, exist_ok=True)
        made = self._run("init", "--quiet", "--bare", str(self._repository))
        if made.returncode != 0:
            raise self._failed("a repository", made.stderr)
        if self._has(sha):
            return
        # First ask for only this commit. This works even if no branch contains the commit any more.
        # But some servers refuse, and send only branches. Then fetch all branches.
        # unpackLimit: store what arrives as one pack, which is there completely or not at all. On a
        # full disk, git may otherwise write the commit and then find no room for its files.
        fetch = (
            *("-c", "fetch.unpackLimit=1"),
            *("fetch", "--quiet", "--no-tags", "--force", "--", self.dataset),
        )
        if self._in_repository(*fetch, sha).returncode != 0 or not self._has(sha):
            branches = "+refs/heads/*:refs/remotes/origin/*"
            done = self._in_repository(*fetch, branches)
            if done.returncode != 0:
                raise self._failed(f"revision {sha}", done.stderr)
        if not self._has(sha):
            raise self._failed(
                f"revision {sha}", "it has no such revision (was it removed by a force-push?)"
            )

    def _has(self, sha: str) -> bool:
        return self._in_repository("cat-file", "-e", f"{sha}^{{commit}}").returncode == 0

    def _check_out(self, sha: str, folder: Path) -> None:
        self._revisions_dir.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self._revisions_dir) as draft:
            files = Path(draft, "files")
            files.mkdir()
            done = self._in_repository(
                # Write symbolic links as plain files. A real link could point to any file on this
                # machine, and this file would be read as data.
                *("-c", "core.symlinks=false", f"--work-tree={files}"),
                # Do not run this user's git-lfs. It would connect to the server that the
                # repository's file `.lfsconfig` names.
                *("-c", "filter.lfs.process=", "-c", "filter.lfs.smudge="),
                *("-c", "filter.lfs.required=false"),
                # `checkout` would fail if the commit has no file.
                *("read-tree", "--reset", "-u", sha),
                index=Path(draft, "index"),
            )
            if done.returncode != 0:
                raise self._failed(f"revision {sha}", done.stderr)
            files.rename(folder)

    def _in_repository(
        self, *arguments: str, index: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        return self._run(f"--git-dir={self._repository}", *arguments, index=index)

    def _run(
        self, *arguments: str, index: Path | None = None, seconds: float | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run git, and return how it ended. Raises HubAway if the server cannot be reached, and
        SnapshotError if the disk is full or git is missing."""
        env = {
            **os.environ,
            "GIT_TERMINAL_PROMPT": "0",
            "GIT_ALLOW_PROTOCOL": "file:git:http:https:ssh",
            "LC_ALL": "C",
        }
        if index is not None:
            env["GIT_INDEX_FILE"] = str(index)
        try:
            done = subprocess.run(
                ["git", *arguments],
                env=env,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=seconds or FETCH_SECONDS,
                check=False,
            )
        except FileNotFoundError as error:
            raise SnapshotError(
                "git is not installed, but a dataset with a git URL needs it; install git"
            ) from error
        except subprocess.TimeoutExpired as error:
            reason = f"git took longer than {seconds or FETCH_SECONDS:.0f} s"
            raise self._failed("it", reason, HubAway) from error
        if done.returncode != 0:
            for line in done.stderr.splitlines():
                if FULL_DISK.search(line):
                    raise self._failed("it", line) from OSError(errno.ENOSPC, line)
                if AWAY.search(line):
                    raise self._failed("it", line, HubAway)
        return done

    def _failed(
        self, what: str, reason: str, kind: type[SnapshotError] = SnapshotError
    ) -> SnapshotError:
        lines = reason.strip().splitlines() or ["git gave no reason"]
        # Logs and outcomes must not contain passwords.
        return kind(
            _LOGIN.sub("://", f"{what} could not be fetched from {self.dataset}: {lines[-1]}")
        )


def _pointed_to(path: Path) -> str | None:
    """The hash of the content, if the file is a pointer of Git LFS."""
    if not may_be_pointer(path.stat().st_size):
        return None
    pointer = Pointer.parse(path.read_bytes())
    return None if pointer is None else pointer.oid


def _replace(path: Path, content: Path) -> None:
    """Put `content` at `path`: as a hard link, or as a copy if the file system has no links. Both
    names of a linked file stay correct, because nothing ever writes to the file."""
    draft = path.with_name(f"{path.name}.draft")
    draft.unlink(missing_ok=True)
    try:
        os.link(content, draft)
    except OSError:
        shutil.copyfile(content, draft)
    draft.replace(path)
