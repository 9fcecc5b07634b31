"""Where datasets come from: a hub (`DatasetHub`), or any git repository (`GitDataset`); and with
which token a hub is asked.

Code in a repository is never run. Logins to git hosts come from git itself: from a credential
helper, or from the SSH keys of this user. A repository stores large files with Git LFS: in git,
such a file is only a pointer, with the hash and the size of the content. `git lfs` fetches the
content.
"""

import errno
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from json import JSONDecodeError
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict

from jobs.spec import is_git_url
from pipeline.formats import Pointer, may_be_pointer
from pipeline.retrain.dataset import NEEDED, is_needed, shown, why_no_data
from pipeline.retrain.errors import HubAway, SnapshotError
from serving.errors import first_line

if TYPE_CHECKING:
    from huggingface_hub import HfApi

OWN_TOKEN = "OWN_HF_TOKEN"
"""The environment variable in which a job finds the user's own token."""

OWN_TOKEN_SOURCE = "HF_TOKEN of the shell that started the stack, or the token of `hf auth login`"


TOKEN_OF_ENV = "PIPELINE_ENV_TOKEN"
"""`pipeline env` sets this variable to the token of its hub, like `HF_TOKEN`. So another stack does
not take this token for the user's own, and sends it to no other hub."""


def token_of_shell(environ: Mapping[str, str], stack_token: str) -> str | None:
    """`HF_TOKEN`, if a person set it."""
    token = environ.get("HF_TOKEN")
    is_of_stack = token in (stack_token, environ.get(TOKEN_OF_ENV))
    return None if is_of_stack else token or None


def own_token(environ: Mapping[str, str], stack_token: str) -> str | None:
    """The token that a person set in this shell, or that `hf auth login` stored."""
    return token_of_shell(environ, stack_token) or cached_login()


def cached_login() -> str | None:
    """The token that `hf auth login` stored."""
    from huggingface_hub import constants

    try:
        return Path(constants.HF_TOKEN_PATH).read_text().strip() or None
    except OSError:
        return None


def is_away(error: BaseException) -> bool:
    """Whether this error of the hub's client means that the hub cannot be reached, is too busy to
    answer, is starting or has failed."""
    import httpx2  # the hub's client raises its errors
    from huggingface_hub.errors import HfHubHTTPError

    # The client may hide a failed connection as the cause of an error about missing files.
    for each in (error, error.__cause__):
        status = each.response.status_code if isinstance(each, HfHubHTTPError) else 0
        # If an answer is not JSON, it does not come from a hub.
        is_no_answer = isinstance(each, httpx2.TransportError | JSONDecodeError)
        if is_no_answer or status == 429 or status >= 500:
            return True
    return False


class Revision(BaseModel):
    """One commit of a dataset, downloaded."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    sha: str
    folder: Path
    files: tuple[str, ...]
    """The paths of all files in the repository, relative to `folder`, and sorted. From a hub, only
    those that a job needs (`is_needed`) are downloaded."""


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

    def head(self, ref: str, seconds: float | None = None) -> str:
        """The commit that `ref` points to, or that a part of its id names. Waits at most `seconds`
        for the answer. Raises SnapshotError."""
        with self._translated(f"{ref} of {self.dataset}"):
            info = self._api.dataset_info(
                self.dataset, revision=ref.removeprefix("refs/heads/"), timeout=seconds
            )
        if info.sha is None:
            raise SnapshotError(f"{ref} of dataset {self.dataset} has no commit yet; push one")
        return info.sha

    def download(self, sha: str) -> Revision:
        """Download the files of the commit `sha` that a job needs. Files in the cache are not
        downloaded again. Raises SnapshotError."""
        from huggingface_hub.utils.tqdm import disable_progress_bars

        disable_progress_bars()  # they would fill the job's log
        with self._translated(f"revision {sha} of {self.dataset}"):
            files = self._api.list_repo_files(self.dataset, repo_type="dataset", revision=sha)
            folder = self._api.snapshot_download(
                self.dataset,
                repo_type="dataset",
                revision=sha,
                cache_dir=self.cache_dir,
                allow_patterns=list(NEEDED),
            )
        return Revision(sha=sha, folder=Path(folder), files=tuple(sorted(files)))

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

    @property
    def _api(self) -> "HfApi":
        from huggingface_hub import HfApi

        return HfApi(self.endpoint, self.token)

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

        try:
            yield
        # The last three: the client cannot understand the name, or the answer.
        except (httpx2.HTTPError, OSError, ValueError, LookupError, TypeError) as error:
            reason = _reason(error, self.token_source if self.token else None)
            raise (HubAway if is_away(error) else SnapshotError)(
                f"{what} could not be fetched from {self.endpoint or 'huggingface.co'}: {reason}"
            ) from error


def _reason(error: Exception, token_source: str | None) -> str:
    """token_source: None if no token is sent."""
    from huggingface_hub.errors import HfHubHTTPError, RevisionNotFoundError

    if isinstance(error, RevisionNotFoundError):
        return "it has no such revision; push it (or was it removed by a force-push?)"
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
    if status not in (401, 403, 404):
        return first_line(error)
    if token_source is None:
        return (
            "there is no such dataset, or it cannot be read without a token, and there is none: set"
            " HF_TOKEN in the shell that starts the stack, or run `hf auth login`"
        )
    return (
        f"there is no such dataset, or {token_source} is wrong, has expired, or may not read this "
        f"dataset ({status}); `pipeline up` creates datasets only on the stack's own hub"
    )


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
    """A dataset in a git repository. Only this pipeline uses `cache_dir`."""

    def __init__(self, url: str, cache_dir: Path) -> None:
        self.dataset = url
        self._repository = cache_dir / "repository.git"
        self._revisions_dir = cache_dir / "revisions"

    def head(self, ref: str, seconds: float = FETCH_SECONDS) -> str:
        """The commit that `ref` points to. Waits at most `seconds` for the answer. Raises
        SnapshotError."""
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
        readable = sorted(file for file in files if shown(file) == file)
        for file in sorted(set(files) - set(readable)):
            if why_no_data(file) is None:
                raise SnapshotError(f"{shown(file)}: its name is not UTF-8; rename the file")
        self._fill(sha, folder, filter(is_needed, readable))
        return Revision(sha=sha, folder=folder, files=tuple(readable))

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
        self, *arguments: str, index: Path | None = None, seconds: float = FETCH_SECONDS
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
                timeout=seconds,
                check=False,
            )
        except FileNotFoundError as error:
            raise SnapshotError(
                "git is not installed, but a dataset with a git URL needs it; install git"
            ) from error
        except subprocess.TimeoutExpired as error:
            reason = f"git took longer than {seconds:.0f} s"
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


Source = DatasetHub | GitDataset


@dataclass(frozen=True, kw_only=True)
class Hubs:
    """The stack's own hub, which the settings call `hub`, and all others, which they call by their
    URL."""

    own: str | None
    """The URL of the stack's own hub."""
    token: str | None = field(repr=False)
    """The token for the stack's own hub."""
    user_token: str | None = field(repr=False)
    """The user's own token, for all others. None for that of `hf auth login`."""

    @classmethod
    def of_shell(cls, own: str, token: str) -> "Hubs":
        return cls(own=own, token=token, user_token=token_of_shell(os.environ, token))

    def address(self, endpoint: str) -> tuple[str | None, str | Literal[False] | None]:
        """The URL of a hub, and the token for it, which is False to send none."""
        if endpoint == "hub":
            return self.own, self.token
        return endpoint, self.user_token or cached_login() or False

    def dataset(self, name: str, endpoint: str, cache_dir: Path) -> Source:
        """name: `owner/name` on the hub, or a git URL."""
        if is_git_url(name):
            return GitDataset(name, cache_dir)
        source = "HF_TOKEN" if endpoint == "hub" else OWN_TOKEN_SOURCE
        return DatasetHub(name, cache_dir, *self.address(endpoint), source)


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
