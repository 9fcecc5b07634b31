"""Fetches a release from a hub: the embedded one or the Hugging Face Hub. A revision of a model
repository there has exactly the files of one release.

What the disk already has is not fetched again. A file that an earlier release has too becomes a
hard link. Of a changed shard, only the tensors that no earlier release has are fetched, by HTTP
range requests. Every file must have the sha256 of the manifest, wherever its bytes came from.

A server runs this module as a program, because a thread that receives and hashes gigabytes would
slow down the thread that computes tokens.
"""

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote

import httpx

from serving.errors import ReleaseError, first_line, is_temporary
from serving.weights.publish import make_visible, unfinished_folder
from serving.weights.release import (
    RELEASE_FILE,
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
_TRIES = 5
"""How many connections may break while one range is fetched. Each continues where the last ended.
"""
_TIMEOUT = httpx.Timeout(30)


@dataclass(frozen=True, kw_only=True)
class Source:
    """A model repository on a hub."""

    endpoint: str
    repo: str
    """`owner/name`."""
    token: str | None = field(default=None, repr=False)

    @property
    def client_options(self) -> dict[str, Any]:
        """For an httpx client. It sends the token only to the hub itself: httpx leaves it out when
        it follows a redirect to another host, as the Hugging Face Hub answers for large files."""
        # A range of a compressed answer would be a range of other bytes.
        headers = {"Accept-Encoding": "identity"}
        if self.token:
            headers["Authorization"] = f"Bearer {self.token}"
        return {"headers": headers, "follow_redirects": True, "timeout": _TIMEOUT}

    def api_url(self, path: str) -> str:
        return f"{self.endpoint}/api/models/{self.repo}/{path}"

    def file_url(self, revision: str, name: str) -> str:
        return f"{self.endpoint}/{self.repo}/resolve/{revision}/{quote(name, safe='')}"


def fetch_release(pipeline_dir: Path, source: Source, revision: str) -> Release:
    """Fetch the release that is this revision into `pipeline_dir / release.id`, unless it is there
    undamaged. A damaged one is replaced.

    A reader sees the complete release or nothing. What a killed process leaves is removed by the
    next call. Raises ReleaseError if the revision is no release or its files do not match its
    manifest, httpx.HTTPError if the hub does not answer as it should, and OSError.
    """
    pipeline_dir.mkdir(parents=True, exist_ok=True)
    with release_lock(pipeline_dir), httpx.Client(**source.client_options) as http:
        answer = http.get(source.file_url(revision, RELEASE_FILE))
        if answer.status_code == httpx.codes.NOT_FOUND:
            raise ReleaseError(
                f"{source.repo} at {revision[:12]} has no {RELEASE_FILE}, so it is not a release"
            )
        release = parse(Release, answer.raise_for_status().content, RELEASE_FILE)
        target = pipeline_dir / release.id
        if target.is_dir() and not verify_release(target):
            return release
        sweep_locked(pipeline_dir)
        known = _Known(pipeline_dir, list_releases(pipeline_dir))
        with unfinished_folder(pipeline_dir) as folder:
            (folder / RELEASE_FILE).write_bytes(answer.content)
            for name in release.files:
                _bring(http, source.file_url(revision, name), folder / name, release, known)
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

    def tensor(self, digest: str) -> bytes | None:
        """The bytes of the tensor. If the disk is damaged, they may be wrong."""
        shard, name = self.tensors.get(digest, (Path(), ""))
        with suppress(ReleaseError, OSError, KeyError):
            if shard not in self._headers:
                self._headers[shard] = read_header(shard)
            place = self._headers[shard][name]
            with shard.open("rb") as file:
                file.seek(place.begin)
                return file.read(place.end - place.begin)
        return None


def _bring(http: httpx.Client, url: str, path: Path, release: Release, known: _Known) -> None:
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
        with suppress(ReleaseError):  # what is fetched as its header is not one
            _patch(http, url, path, release, known)
        if digest_file(path) == entry:
            return
    with path.open("wb") as file:
        _read(http, url, file, 0, entry.size)
    if (found := digest_file(path)) != entry:
        raise ReleaseError(
            f"{url}: sha256 is {found.sha256[:12]}…, but {entry.sha256[:12]}… in {RELEASE_FILE}"
        )


def _patch(http: httpx.Client, url: str, path: Path, release: Release, known: _Known) -> None:
    """Make the shard `path` of tensors on this disk, and fetch the others. If the hub sends no
    ranges, or what it sends is wrong, the file is wrong after this."""
    entry = release.files[path.name]
    with path.open("w+b") as file:
        if not _read(http, url, file, 0, 8):
            return
        file.seek(0)
        end = 8 + int.from_bytes(file.read(8), "little")
        if end > entry.size:
            return
        _read(http, url, file, 8, end)
        file.truncate(entry.size)
        file.flush()
        missing = []
        for name, place in read_header(path).items():
            told = release.tensors.get(name)
            content = None if told is None else known.tensor(told.digest)
            if content is None or len(content) != place.end - place.begin:
                missing.append((place.begin, place.end))
            else:
                file.seek(place.begin)
                file.write(content)
        for begin, end in _merged(missing):
            _read(http, url, file, begin, end)


def _merged(ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The ranges in their order, with small gaps filled."""
    merged: list[tuple[int, int]] = []
    for begin, end in sorted(ranges):
        if merged and begin - merged[-1][1] <= _MAX_GAP_BYTES:
            begin, _ = merged.pop()
        merged.append((begin, end))
    yield from merged


def _read(http: httpx.Client, url: str, file: BinaryIO, begin: int, end: int) -> bool:
    """Write the bytes from `begin` to `end` of the file at `url` into `file`, at the same places.
    Returns whether the hub sends ranges. If it sends the whole file instead, all bytes up to `end`
    are written. Raises httpx.HTTPError."""
    is_range = True
    for _ in range(_TRIES):
        if begin >= end:
            return is_range
        asked = {"Range": f"bytes={begin}-{end - 1}"}
        with suppress(httpx.TransportError), http.stream("GET", url, headers=asked) as answer:
            is_range = answer.raise_for_status().status_code == httpx.codes.PARTIAL_CONTENT
            begin = begin if is_range else 0
            file.seek(begin)
            for piece in answer.iter_raw():
                begin += file.write(piece[: end - begin])
                if begin >= end:
                    return is_range
    raise httpx.ReadError(f"{url}: the answer broke off {_TRIES} times, last at byte {begin}")


def main() -> None:
    """`python -m serving.weights.fetch FOLDER ENDPOINT REPO REVISION`, with the token in HF_TOKEN:
    prints the id of the release, or one line on stderr that says what is wrong."""
    folder, endpoint, repo, revision = sys.argv[1:]
    source = Source(endpoint=endpoint, repo=repo, token=os.environ.get("HF_TOKEN"))
    os.nice(10)  # the server computes beside it
    try:
        print(fetch_release(Path(folder), source, revision).id)
    except (ReleaseError, httpx.HTTPError, OSError) as error:
        print(first_line(error), file=sys.stderr)
        is_final = isinstance(error, ReleaseError) and not is_temporary(error)
        sys.exit(1 if is_final else EXIT_LATER)


if __name__ == "__main__":
    main()
