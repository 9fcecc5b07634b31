"""Asks git which paths `.gitattributes` marks as large files, and which paths `.gitignore`
excludes."""

import contextlib
import re
import tempfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from pipeline.hub.errors import BadRequest, TooSlow
from pipeline.hub.git.process import git
from pipeline.hub.repositories.store import Repository

ATTRIBUTES_FILE = ".gitattributes"
IGNORE_FILE = ".gitignore"

_MATCHING_SECONDS = 20.0
"""For 100,000 paths and ordinary patterns, git needs less than one second. For a pattern with many
`*`, it may need years."""

_TRACKED = "filter=lfs diff=lfs merge=lfs -text"
"""The attributes that `git lfs track` writes after a pattern."""

_ENDINGS = (
    *("7z", "arrow", "avro", "bin", "bz2", "ckpt", "feather", "gguf", "gz", "h5", "joblib", "lz4"),
    *("mds", "msgpack", "npy", "npz", "onnx", "orc", "parquet", "pickle", "pkl", "pt", "pth"),
    *("rar", "safetensors", "tar", "tgz", "wasm", "webdataset", "xz", "zip", "zst"),
    *("flac", "m4a", "mp3", "ogg", "pcm", "wav"),
    *("avif", "bmp", "gif", "jpeg", "jpg", "png", "tiff", "webp", "avi", "mkv", "mp4", "webm"),
)
NEW_REPOSITORY = "".join(f"*.{ending} {_TRACKED}\n" for ending in _ENDINGS)
"""The `.gitattributes` of a new repository. It lists formats whose files are often large and that
no diff can show."""


def large_file_paths(
    repository: Repository, attributes: Mapping[str, str], paths: Collection[str]
) -> set[str]:
    """The paths among `paths` that the `.gitattributes` files mark as large files.

    `attributes` maps the path of each `.gitattributes` to the sha of its blob.
    """
    with tempfile.TemporaryDirectory() as folder:
        index = {"GIT_INDEX_FILE": f"{folder}/index"}
        # Sorted, because git adds an entry quickly only at the end of the index.
        entries = "".join(f"100644 {sha}\t{path}\0" for path, sha in sorted(attributes.items()))
        git(
            repository.folder,
            *("update-index", "-z", "--index-info"),
            stdin=entries.encode(),
            extra=index,
        )
        with _patterns_of(ATTRIBUTES_FILE):
            answer = git(
                repository.folder,
                *("check-attr", "--cached", "-z", "--stdin", "filter"),
                stdin="".join(f"{path}\0" for path in paths).encode(),
                extra=index,
                seconds=_MATCHING_SECONDS,
            )
    fields = answer.decode().split("\0")
    return {path for path, value in zip(fields[::3], fields[2::3], strict=False) if value == "lfs"}


def ignored_paths(repository: Repository, ignore_file: bytes, paths: Collection[str]) -> set[str]:
    """The paths among `paths` that git ignores if the root has a `.gitignore` with the content
    `ignore_file`."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / IGNORE_FILE).write_bytes(ignore_file)
        with _patterns_of(IGNORE_FILE):
            answer = git(
                repository.folder,
                *(f"--work-tree={folder}", "check-ignore", "--no-index", "-z", "--stdin"),
                # With `./`, because git gives a colon at the beginning of a path a special meaning.
                stdin="".join(f"./{path}\0" for path in paths).encode(),
                may_exit_with=(1,),  # no path is ignored
                seconds=_MATCHING_SECONDS,
            )
    return {path.removeprefix("./") for path in answer.decode().split("\0")[:-1]}


@contextlib.contextmanager
def _patterns_of(file: str) -> Iterator[None]:
    """Raises BadRequest if git needs too long in the block, to compare the patterns of `file`."""
    try:
        yield
    except TooSlow:
        raise BadRequest(
            f"Git needs more than {_MATCHING_SECONDS:g} s to compare the paths with the patterns "
            f"in {file}: use fewer `*` in each pattern of {file}, or send fewer files at once."
        ) from None


def tracking_line(path: str) -> str:
    """The line of `.gitattributes` that makes only the file `path` a large file."""
    pattern = re.sub(r"([\\*?\[\]])", r"\\\1", path)
    # A space would end the pattern. (So would a tab or a newline, but no path has one.) White space
    # outside ASCII does not, and `[[:space:]]` does not match it, because git compares bytes.
    pattern = pattern.replace(" ", "[[:space:]]")
    return f"/{pattern} {_TRACKED}\n"
