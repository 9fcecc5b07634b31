"""Fetches a release from a hub: the embedded one or the Hugging Face Hub. A revision of a model
repository there has exactly the files of one release.

What the disk already has is not fetched again. A file that an earlier release has too becomes a
hard link. Of a changed shard, only the tensors that no earlier release has are fetched, by HTTP
range requests. Every file must have the sha256 of the manifest, wherever its bytes came from.

A server runs this module as a program, because a thread that receives and hashes gigabytes would
slow down the thread that computes tokens. It uses urllib, because httpx takes longer to import and
to receive than a small release takes to copy.
"""

import gc
import hashlib
import json
import os
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import HTTPRedirectHandler, Request, build_opener

from serving.errors import ReleaseError, first_line, is_temporary
from serving.weights.publish import make_visible, unfinished_folder
from serving.weights.release import (
    RELEASE_FILE,
    FileEntry,
    HeaderEntry,
    Release,
    digest_file,
    parse,
    read_header,
)
from serving.weights.release_store import UNFINISHED, list_releases, release_lock, sweep_locked
from serving.weights.verify import verify_layout, verify_release

EXIT_LATER = 75
"""The exit code after an error that may be gone at the next try (EX_TEMPFAIL of sysexits.h)."""
_MAX_GAP_BYTES = 256 * 1024
"""Two ranges with at most so many unchanged bytes between them are fetched as one, because one more
request takes longer than these bytes."""
_PIECE_BYTES = 1024 * 1024
_SYNC_BYTES = 64 * _PIECE_BYTES
"""After so many bytes, the disk is told to write them, while the next ones come."""
_TRIES = 5
"""How many connections may break while one range is fetched. Each continues where the last ended.
"""
_TIMEOUT_SECONDS = 30.0


@dataclass(frozen=True, kw_only=True)
class Source:
    """A model repository on a hub."""

    endpoint: str
    repo: str
    """`owner/name`."""
    token: str | None = field(default=None, repr=False)

    @property
    def headers(self) -> dict[str, str]:
        # A range of a compressed answer would be a range of other bytes.
        headers = {"Accept-Encoding": "identity"}
        if self.token:
            headers["Authorization"] = f"Bearer {self.token}"
        return headers

    @property
    def client_options(self) -> dict[str, Any]:
        """For an httpx client. It sends the token only to the hub itself: httpx leaves it out when
        it follows a redirect to another host."""
        return {"headers": self.headers, "follow_redirects": True, "timeout": _TIMEOUT_SECONDS}

    def api_url(self, path: str) -> str:
        return f"{self.endpoint}/api/models/{self.repo}/{path}"

    def file_url(self, revision: str, name: str) -> str:
        return f"{self.endpoint}/{self.repo}/resolve/{revision}/{quote(name, safe='')}"


def fetch_release(pipeline_dir: Path, source: Source, revision: str) -> Release:
    """Fetch the release that is this revision into `pipeline_dir / release.id`, unless it is there
    undamaged. A damaged one is replaced.

    A reader sees the complete release or nothing. What a killed process leaves is removed by the
    next call. Raises ReleaseError if the revision is no release or its files do not match its
    manifest, and HTTPException or OSError if the hub does not answer as it should, or for the disk.
    """
    pipeline_dir.mkdir(parents=True, exist_ok=True)
    with release_lock(pipeline_dir):
        try:
            with open_file(source, source.file_url(revision, RELEASE_FILE)) as answer:
                manifest = answer.read()
        except HTTPError as error:
            if error.code != HTTPStatus.NOT_FOUND:
                raise
            raise ReleaseError(
                f"{source.repo} at {revision[:12]} has no {RELEASE_FILE}, so it is not a release"
            ) from None
        release = parse(Release, manifest, RELEASE_FILE)
        target = pipeline_dir / release.id
        if target.is_dir() and not verify_release(target):
            return release
        sweep_locked(pipeline_dir)
        known = _Known(pipeline_dir, list_releases(pipeline_dir))
        with unfinished_folder(pipeline_dir) as folder:
            (folder / RELEASE_FILE).write_bytes(manifest)

            def bring(name: str) -> None:
                _bring(source, source.file_url(revision, name), folder / name, release, known)

            # The hub takes a while to find a file, so the small ones come beside a large one.
            with ThreadPoolExecutor(2) as pool:
                list(pool.map(bring, release.files))
            if reasons := verify_layout(folder, release):
                raise ReleaseError(*reasons)
            if target.is_dir():
                target.rename(pipeline_dir / f"{UNFINISHED}{release.id}")
            make_visible(folder, target)
        sweep_locked(pipeline_dir)
    return release


class _Known:
    """Where the bytes are that these releases have. Of equal bytes, the last release counts."""

    def __init__(self, pipeline_dir: Path, releases: Iterable[Release]) -> None:
        self.files: dict[str, Path] = {}
        """sha256 of a file → the file."""
        self.tensors: dict[str, tuple[Path, str]] = {}
        """Digest of a tensor → its shard, and its name there."""
        self._headers: dict[Path, dict[str, HeaderEntry]] = {}
        for release in releases:
            folder = pipeline_dir / release.id
            self.files |= {each.sha256: folder / name for name, each in release.files.items()}
            self.tensors |= {
                each.digest: (folder / each.file, name) for name, each in release.tensors.items()
            }

    def tensor(self, digest: str) -> bytes:
        """The bytes of the tensor. If the disk is damaged, they may be wrong or missing."""
        shard, name = self.tensors.get(digest, (Path(), ""))
        with suppress(ReleaseError, OSError, KeyError):
            if shard not in self._headers:
                self._headers[shard] = read_header(shard)
            place = self._headers[shard][name]
            with shard.open("rb") as file:
                file.seek(place.begin)
                return file.read(place.end - place.begin)
        return b""


def _bring(source: Source, url: str, path: Path, release: Release, known: _Known) -> None:
    """Make the file `path` in the cheapest way that gives the right bytes."""
    entry = release.files[path.name]
    with suppress(OSError, KeyError):
        os.link(known.files[entry.sha256], path)
    if path.exists():
        if digest_file(path) == entry:
            return
        path.unlink()  # never written to: it is also the file of the other release
    tensors = {each.digest for each in release.tensors.values() if each.file == path.name}
    if tensors & known.tensors.keys():
        # A hub that sends no ranges, a header that is none, and a damaged disk give another file.
        with suppress(ValueError, KeyError, TypeError, HTTPException):
            if _written(path, _patched(source, url, entry, release, known)) == entry:
                return
    found = _written(path, _pieces(source, url, 0, entry.size))
    if found != entry:
        raise ReleaseError(
            f"{url}: sha256 is {found.sha256[:12]}…, but {entry.sha256[:12]}… in {RELEASE_FILE}"
        )


def _written(path: Path, pieces: Iterable[bytes]) -> FileEntry:
    """Write the pieces to `path`. Another thread computes the sha256 meanwhile."""
    digest = hashlib.sha256()
    with path.open("wb") as file, ThreadPoolExecutor(2) as pool:
        digested: Future[None] = pool.submit(digest.update, b"")
        synced, unsynced = digested, 0
        for piece in pieces:
            file.write(piece)
            digested.result()
            digested = pool.submit(digest.update, piece)
            unsynced += len(piece)
            if unsynced >= _SYNC_BYTES and synced.done():
                synced, unsynced = pool.submit(os.fdatasync, file.fileno()), 0
        digested.result()
        synced.result()
        size = file.tell()
    return FileEntry(size=size, sha256=digest.hexdigest())


def _patched(
    source: Source, url: str, entry: FileEntry, release: Release, known: _Known
) -> Iterator[bytes]:
    """The shard at `url`, of tensors on this disk, and of ranges for the others. Ends early if the
    hub sends no ranges."""
    with open_file(source, url, 0, 8) as answer:
        if answer.status != HTTPStatus.PARTIAL_CONTENT:
            return
        length = answer.read()
    end = 8 + int.from_bytes(length, "little")
    header = b"".join(_pieces(source, url, 8, min(end, entry.size)))
    yield length + header
    places = []
    for name, told in json.loads(header).items():
        if name != "__metadata__":
            begin, stop = (end + offset for offset in told["data_offsets"])
            places.append((begin, stop, release.tensors[name].digest))
    places.sort()
    missing = dict(
        _merged((begin, stop) for begin, stop, digest in places if digest not in known.tensors)
    )
    at = end
    for begin, _, digest in places:
        if begin in missing:
            at = missing[begin]
            yield from _pieces(source, url, begin, at)
        elif begin >= at:
            yield known.tensor(digest)


def _merged(ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The ranges in their order, with small gaps filled."""
    merged: list[tuple[int, int]] = []
    for begin, end in ranges:
        if merged and begin - merged[-1][1] <= _MAX_GAP_BYTES:
            begin, _ = merged.pop()
        merged.append((begin, end))
    yield from merged


def _pieces(source: Source, url: str, begin: int, end: int) -> Iterator[bytes]:
    """The bytes from `begin` to `end` of the file at `url`. Raises OSError."""
    problem = "it ended too early"
    for _ in range(_TRIES):
        if begin >= end:
            return
        try:
            with open_file(source, url, begin, end) as answer:
                # If the hub sends no ranges, drop what is before this one.
                to_drop = 0 if answer.status == HTTPStatus.PARTIAL_CONTENT else begin
                while begin < end and (
                    piece := answer.read(min(_PIECE_BYTES, to_drop or end - begin))
                ):
                    if to_drop:
                        to_drop -= len(piece)
                    else:
                        begin += len(piece)
                        yield piece
        except HTTPError:
            raise
        except (HTTPException, OSError) as error:
            problem = first_line(error)
    if begin < end:
        raise ConnectionError(f"{url}: broke off {_TRIES} times, last at byte {begin}: {problem}")


def open_file(source: Source, url: str, begin: int = 0, end: int | None = None) -> HTTPResponse:
    """The answer with the file at `url`, or with a part of it. Raises HTTPException and OSError,
    such as HTTPError for an answer of another status."""
    asked = Request(url, headers=source.headers)
    if end is not None:
        asked.add_header("Range", f"bytes={begin}-{end - 1}")
    try:
        answer: HTTPResponse = _OPENER.open(asked, timeout=_TIMEOUT_SECONDS)
        return answer
    except HTTPError as error:
        error.close()
        error.msg = f"{error.headers.get('X-Error-Message', error.msg)} ({url})"
        raise


class _Redirects(HTTPRedirectHandler):
    """Sends the token only to the hub itself: the Hugging Face Hub redirects to another host for
    large files."""

    def redirect_request(self, request: Request, *told: Any) -> Request | None:
        there = super().redirect_request(request, *told)
        if there is not None and (there.type, there.host) != (request.type, request.host):
            there.remove_header("Authorization")
        return there


_OPENER = build_opener(_Redirects)


def main() -> None:
    """`python -m serving.weights.fetch FOLDER ENDPOINT REPO REVISION`, with the token in HF_TOKEN:
    prints the id of the release, or one line on stderr that says what is wrong."""
    folder, endpoint, repo, revision = sys.argv[1:]
    source = Source(endpoint=endpoint, repo=repo, token=os.environ.get("HF_TOKEN"))
    os.nice(10)  # the server computes beside it
    gc.freeze()  # the end of the process would look at all that was imported, for 40 ms
    if endpoint.startswith("https:"):  # the system may have no certificates, or other ones
        from certifi import where

        os.environ.setdefault("SSL_CERT_FILE", where())
    try:
        print(fetch_release(Path(folder), source, revision).id)
    except (ReleaseError, HTTPException, OSError) as error:
        print(first_line(error), file=sys.stderr)
        is_final = isinstance(error, ReleaseError) and not is_temporary(error)
        sys.exit(1 if is_final else EXIT_LATER)


if __name__ == "__main__":
    main()
