"""Fetches dataset revisions from any git repository. Code in the repository is never run.

Logins come from git itself: from a credential helper, or from the SSH keys of this user.
"""

import errno
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from pipeline.retrain.data_files import shown, why_no_data
from pipeline.retrain.errors import HubAway, SnapshotError
from pipeline.retrain.large_files import LargeFiles
from pipeline.retrain.lfs_address import git_environment, without_logins
from pipeline.retrain.snapshot import Revision

FETCH_SECONDS = 1800.0
AWAY = re.compile(
    "Could not resolve host|(Failed|unable) to connect|Connection (refused|reset|closed|timed out)"
    "|timed out|Empty reply from server|early EOF|The requested URL returned error: (429|5\\d\\d)"
)
"""What git and ssh print if the server cannot be reached, or is too busy to answer."""
FULL_DISK = re.compile(
    # If the disk is full, some git commands only say that they could not write a file. If it is not
    # allowed to write the file, git says so in the same line.
    "No space left on device|Out of diskspace|Disk quota exceeded"
    "|(unable|failed) to write(?!.*(Permission denied|Read-only file system))"
)


class GitDataset:
    """A dataset in a git repository. It has the same methods as `DatasetHub`, which is for datasets
    on a hub. Only this pipeline uses `cache_dir`."""

    def __init__(self, url: str, cache_dir: Path) -> None:
        self.dataset = url
        self._repository = cache_dir / "repository.git"
        self._revisions_dir = cache_dir / "revisions"
        self._large_files = LargeFiles(url, cache_dir / "lfs")

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
        self._large_files.fill(folder, revision.files)
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
        self._large_files.forget_unused(self._revisions_dir)

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
        env = git_environment()
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
        return kind(without_logins(f"{what} could not be fetched from {self.dataset}: {lines[-1]}"))
