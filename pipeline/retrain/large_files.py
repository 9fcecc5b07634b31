"""Fetches the files that a git repository stores with Git LFS. In the repository itself, each of
these files is only a pointer: a small file with the hash and the size of the content.

The content is fetched with the batch API of Git LFS:
https://github.com/git-lfs/git-lfs/blob/main/docs/api/batch.md. The address of the API is derived
from the address of the repository. The repository's file `.lfsconfig` is ignored, because it could
make this machine connect to any server.
"""

import filecmp
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from pipeline.pointers import Pointer, may_be_pointer
from pipeline.retrain.errors import HubAway, SnapshotError
from pipeline.retrain.hub_away import OVERLOADED
from pipeline.retrain.lfs_address import Address, address_of, credentials, without_logins

_BATCH = 100
_CHUNK_BYTES = 1024 * 1024
_JSON = "application/vnd.git-lfs+json"


class LargeFiles:
    """The LFS files of one repository. Fetched files stay in `cache_dir`, so that each file is
    fetched only once."""

    def __init__(self, url: str, cache_dir: Path) -> None:
        self._url = url
        self._cache_dir = cache_dir

    def fill(self, folder: Path, files: Iterable[str]) -> None:
        """Replace each pointer among `files` by its content.

        Raises HubAway if the server cannot be reached or is too busy. For any other failure, raises
        SnapshotError, which names the first file that could not be fetched.
        """
        pointers = {file: pointer for file in files if (pointer := _pointer(folder / file))}
        missing = {
            pointer.oid: (file, pointer)
            for file, pointer in pointers.items()
            if not self._path(pointer.oid).is_file()
        }
        if missing:
            self._cache_dir.mkdir(parents=True, exist_ok=True)
            self._fetch(list(missing.values()))
        for file, pointer in pointers.items():
            _replace(folder / file, self._path(pointer.oid))

    def forget_unused(self, revisions_dir: Path) -> None:
        """Remove the cached files that no revision in `revisions_dir` uses any more. A revision
        uses a cached file through a hard link, or has a copy of it if the file system has no
        links."""
        for path in self._cache_dir.glob("??/*"):
            if path.stat().st_nlink == 1 and not _has_copy(revisions_dir, path):
                path.unlink()

    def _path(self, oid: str) -> Path:
        return self._cache_dir / oid[:2] / oid

    def _fetch(self, wanted: Sequence[tuple[str, Pointer]]) -> None:
        address = address_of(self._url)
        if isinstance(address, Path):
            for file, pointer in wanted:
                self._copy(file, pointer, address)
            return
        with httpx.Client(timeout=60.0, follow_redirects=True) as client:
            remote = _Remote(client, self._url, address)
            for start in range(0, len(wanted), _BATCH):
                batch = wanted[start : start + _BATCH]
                with _translated(batch[0][0], self._url):
                    actions = remote.actions(batch)
                for file, pointer in batch:
                    with (
                        _translated(file, self._url),
                        remote.stream(file, actions[pointer.oid]) as answer,
                    ):
                        self._keep(file, pointer, answer.iter_bytes(_CHUNK_BYTES))

    def _copy(self, file: str, pointer: Pointer, repository: Path) -> None:
        """Take the content from a repository on this machine, which may be bare or not."""
        for folder in (repository, repository / ".git"):
            oid = pointer.oid
            path = folder / "lfs" / "objects" / oid[:2] / oid[2:4] / oid
            if path.is_file():
                with _translated(file, self._url), path.open("rb") as source:
                    self._keep(file, pointer, iter(lambda: source.read(_CHUNK_BYTES), b""))
                return
        raise _missing(file, self._url, "it has only the pointer; run `git lfs fetch --all` in it")

    def _keep(self, file: str, pointer: Pointer, content: Iterable[bytes]) -> None:
        """Put `content` into the cache. Raises SnapshotError if its size or its hash differs from
        that in the pointer."""
        digest, num_bytes = hashlib.sha256(), 0
        draft = tempfile.NamedTemporaryFile(dir=self._cache_dir, delete=False)  # noqa: SIM115
        try:
            with draft:
                for piece in content:
                    digest.update(piece)
                    num_bytes += len(piece)
                    if num_bytes > pointer.size:
                        break
                    draft.write(piece)
            if (digest.hexdigest(), num_bytes) != (pointer.oid, pointer.size):
                raise _missing(
                    file,
                    self._url,
                    f"what came has {num_bytes} bytes and the sha256 {digest.hexdigest()}, but the "
                    f"pointer says {pointer.size} bytes and {pointer.oid}",
                )
            path = self._path(pointer.oid)
            path.parent.mkdir(exist_ok=True)
            Path(draft.name).rename(path)
        finally:
            Path(draft.name).unlink(missing_ok=True)


class _Remote:
    """The LFS server of a repository."""

    def __init__(self, client: httpx.Client, url: str, address: Address) -> None:
        self._client = client
        self._url = url
        self._address = address
        self._headers: dict[str, str] = dict(address.headers)
        self._may_log_in = True

    def actions(self, wanted: Sequence[tuple[str, Pointer]]) -> dict[str, Mapping[str, Any]]:
        """Ask the server where each file can be fetched. The result maps the hash of each file
        (`oid`) to a download action: a URL and headers."""
        file = wanted[0][0]
        body = {
            "operation": "download",
            "transfers": ["basic"],
            "hash_algo": "sha256",
            "objects": [{"oid": each.oid, "size": each.size} for _, each in wanted],
        }
        answer = self._ask(file, body)
        try:
            told = {each["oid"]: each for each in answer.json()["objects"]}
            found = {}
            for file, pointer in wanted:
                if error := told[pointer.oid].get("error"):
                    raise _missing(file, self._url, f"{error['message']} ({error['code']})")
                found[pointer.oid] = told[pointer.oid]["actions"]["download"]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise _missing(
                file, self._url, f"its LFS server sent an answer that is not valid: {error!r}"
            ) from error
        return found

    @contextmanager
    def stream(self, file: str, action: Mapping[str, Any]) -> Iterator[httpx.Response]:
        """Begin to download the content. The login of the repository is sent only to the server
        that it belongs to."""
        href = str(action["href"])
        headers = {str(name): str(value) for name, value in (action.get("header") or {}).items()}
        if not headers and _origin(href) == _origin(self._address.url):
            headers = self._headers
        with self._client.stream("GET", href, headers=headers) as answer:
            if not answer.is_success:
                answer.read()
                raise _refused(file, self._url, answer)
            yield answer

    def _ask(self, file: str, body: object) -> httpx.Response:
        url = f"{self._address.url}/objects/batch"
        while True:
            headers = {"Accept": _JSON, "Content-Type": _JSON, **self._headers}
            answer = self._client.post(url, json=body, headers=headers)
            if answer.is_success:
                return answer
            if answer.status_code != 401 or not self._may_log_in:
                raise _refused(file, self._url, answer)
            self._may_log_in = False
            self._headers |= credentials(self._address.url)


def _pointer(path: Path) -> Pointer | None:
    if not path.is_file() or not may_be_pointer(path.stat().st_size):
        return None
    return Pointer.parse(path.read_bytes())


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


def _has_copy(folder: Path, content: Path) -> bool:
    """Whether a file in `folder` has the same content. `filecmp.cmp` reads only files of the same
    size."""
    return any(path.is_file() and filecmp.cmp(path, content) for path in folder.rglob("*"))


def _origin(url: str) -> tuple[str, str, int | None]:
    parsed = httpx.URL(url)
    return parsed.scheme, parsed.host, parsed.port


def _refused(file: str, url: str, answer: httpx.Response) -> SnapshotError:
    try:
        reason = f"{answer.json()['message']} ({answer.status_code})"
    except (ValueError, KeyError, TypeError):
        reason = f"its LFS server answered {answer.status_code}"
    error = _missing(file, url, reason)
    return HubAway(str(error)) if answer.status_code in OVERLOADED else error


def _missing(file: str, url: str, reason: str) -> SnapshotError:
    return SnapshotError(
        f"{file} is a pointer of Git LFS, and its content could not be fetched from "
        f"{without_logins(url)}: {without_logins(reason)}"
    )


@contextmanager
def _translated(file: str, url: str) -> Iterator[None]:
    """Inside, a failed connection becomes a HubAway, and any other error of the network or the disk
    becomes a SnapshotError."""
    try:
        yield
    except httpx.TransportError as error:
        raise HubAway(str(_missing(file, url, str(error) or repr(error)))) from error
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
        raise _missing(file, url, str(error) or repr(error)) from error
