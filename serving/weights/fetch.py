"""Fetches a release from a hub: the embedded one or the Hugging Face Hub. A revision of a model
repository there has exactly the files of one release.

What the disk already has is not fetched again: a file that an earlier release has too becomes a
hard link. Every file must have the sha256 of the manifest, wherever its bytes came from.

A server runs this module as a program, because a thread that receives and hashes gigabytes would
slow down the thread that computes tokens.
"""

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote

import httpx

from serving.errors import ReleaseError, first_line, is_temporary
from serving.weights.publish import make_visible, unfinished_folder
from serving.weights.release import RELEASE_FILE, Release, digest_file, parse
from serving.weights.release_store import UNFINISHED, list_releases, release_lock, sweep_locked
from serving.weights.verify import verify_layout, verify_release

EXIT_LATER = 75
"""The exit code after an error that may be gone at the next try (EX_TEMPFAIL of sysexits.h)."""
_TRIES = 5
"""How many connections may break while one file is fetched. Each continues where the last ended.
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
        present = {
            entry.sha256: pipeline_dir / each.id / name
            for each in list_releases(pipeline_dir)
            for name, entry in each.files.items()
        }
        with unfinished_folder(pipeline_dir) as folder:
            (folder / RELEASE_FILE).write_bytes(answer.content)
            for name in release.files:
                _bring(http, source.file_url(revision, name), folder / name, release, present)
            if reasons := verify_layout(folder, release):
                raise ReleaseError(*reasons)
            if target.is_dir():
                target.rename(pipeline_dir / f"{UNFINISHED}{release.id}")
            make_visible(folder, target)
        sweep_locked(pipeline_dir)
    return release


def _bring(
    http: httpx.Client, url: str, path: Path, release: Release, present: Mapping[str, Path]
) -> None:
    """Make the file `path`. `present` are the files on this disk by their sha256; one may be
    damaged."""
    entry = release.files[path.name]
    with suppress(OSError, KeyError):
        os.link(present[entry.sha256], path)
    if path.exists():
        if digest_file(path) == entry:
            return
        path.unlink()  # never written to: it is also the file of the other release
    with path.open("wb") as file:
        _download(http, url, file)
    if (found := digest_file(path)) != entry:
        raise ReleaseError(
            f"{url}: sha256 is {found.sha256[:12]}…, but {entry.sha256[:12]}… in {RELEASE_FILE}"
        )


def _download(http: httpx.Client, url: str, file: BinaryIO) -> None:
    """Write the content at `url` into the empty `file`. Raises httpx.HTTPError."""
    for _ in range(_TRIES):
        rest = {"Range": f"bytes={file.tell()}-"} if file.tell() else {}
        with suppress(httpx.TransportError), http.stream("GET", url, headers=rest) as answer:
            if answer.raise_for_status().status_code != httpx.codes.PARTIAL_CONTENT:
                file.seek(0)
            for piece in answer.iter_raw():
                file.write(piece)
            return
    raise httpx.ReadError(f"{url}: the answer broke off {_TRIES} times, last at {file.tell()}")


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
