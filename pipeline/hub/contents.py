"""Reads a repository, with few git processes: its objects, trees, files and commits, and the card
in its README. Asks git which paths `.gitattributes` marks as large files, and which paths
`.gitignore` excludes. Changes nothing in the repository."""

import re
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import yaml
from pydantic_core import to_jsonable_python

from pipeline.formats import HEAD, MAX_HEAD_CHARACTERS, HeadLoader, Pointer, may_be_pointer
from pipeline.hub.errors import EntryNotFound, RequestError, RevisionNotFound
from pipeline.hub.git import git, lines_of
from pipeline.hub.http_json import Json, iso_time
from pipeline.hub.repositories import SHA, Repository, is_path, is_ref_name, read_refs

_BLOBS_PER_PROCESS = 10_000

Object = tuple[str, str, int]
"""The sha, the type and the size in bytes of one of git's objects."""


def look_up(repository: Repository, expressions: Iterable[str]) -> list[Object | None]:
    """The object of each expression such as `main:README.md`. None if git has no such object."""
    stdin = "".join(f"{expression}\n" for expression in expressions).encode()
    output = git(repository.folder, "cat-file", "--batch-check", stdin=stdin)
    return [_object(line) for line in lines_of(output)]


def all_objects(repository: Repository) -> list[Object]:
    """Every object of the repository, whether or not a ref leads to it."""
    options = ("--batch-check", "--batch-all-objects", "--unordered")
    output = git(repository.folder, "cat-file", *options)
    return [found for line in lines_of(output) if (found := _object(line)) is not None]


def _object(line: str) -> Object | None:
    fields = line.split(" ")
    # If there is no such object, git prints "<expression> missing" or "<expression> ambiguous".
    if len(fields) == 3 and SHA.fullmatch(fields[0]) and fields[2].isdigit():
        return fields[0], fields[1], int(fields[2])
    return None


def all_commits(repository: Repository) -> list[str]:
    """Every commit of the repository, whether or not a ref leads to it."""
    return [sha for sha, kind, _ in all_objects(repository) if kind == "commit"]


def pointers_of(repository: Repository, objects: Iterable[Object | None]) -> Mapping[str, Pointer]:
    """The pointers among the objects, by the sha of the blob. Reads only the small blobs."""
    small = [
        found[0] for found in objects if found and found[1] == "blob" and may_be_pointer(found[2])
    ]
    return {
        sha: pointer
        for sha, content in read_blobs(repository, small)
        if (pointer := Pointer.parse(content)) is not None
    }


def read_blobs(repository: Repository, shas: Sequence[str]) -> Iterator[tuple[str, bytes]]:
    """The sha and the content of each of these blobs. Skips blobs that git does not have. Up to
    `_BLOBS_PER_PROCESS` contents are in memory at the same time, so the blobs must be small."""
    unique = list(dict.fromkeys(shas))
    for first in range(0, len(unique), _BLOBS_PER_PROCESS):
        stdin = "".join(f"{sha}\n" for sha in unique[first : first + _BLOBS_PER_PROCESS]).encode()
        output = git(repository.folder, "cat-file", "--batch", stdin=stdin)
        start = 0
        while start < len(output):
            end = output.index(b"\n", start)
            # Git prints "<sha> <type> <size>" and then the content, or only "<sha> missing".
            sha, *facts = output[start:end].decode().split()
            start = end + 1
            if len(facts) == 2:
                size = int(facts[1])
                yield sha, output[start : start + size]
                start += size + 1


_EMPTY_TREE = "4b825dc642cb6eb9a060e54bf8d69288fbee4904"


@dataclass(frozen=True, kw_only=True)
class Entry:
    type: Literal["file", "directory"]
    path: str
    oid: str
    """The SHA-1 of git's blob or tree."""
    size_bytes: int = 0
    """The size of git's blob. The blob of a large file is its pointer. 0 for a folder, or if the
    size was not read."""
    is_executable: bool = False
    is_link: bool = False
    """Whether `changed_files` found a symbolic link here. False if another function read this."""
    lfs: Pointer | None = None
    """The pointer, if the blob is a pointer to a large file. None for other blobs, or if the blob
    was not read."""

    @property
    def content_bytes(self) -> int:
        """The size of what a reader gets: the large file if the blob is a pointer, else the
        blob."""
        return self.size_bytes if self.lfs is None else self.lfs.size


def list_tree(
    repository: Repository, commit: str, folder: str = "", *, recursive: bool
) -> list[Entry]:
    """The files and folders in `folder` (`""` is the root), in git's order. Raises EntryNotFound if
    there is no such folder."""
    if folder:
        found = find_paths(repository, commit, [folder])
        if not found or found[0].type != "directory":
            raise EntryNotFound(
                f"The {repository.name} has no folder {folder!r} in the commit {commit}.",
                commit=commit,
            )
    options = ["-r", "-t"] if recursive else []
    output = git(repository.folder, "ls-tree", "-z", "-l", *options, f"{commit}:{folder}")
    return _with_pointers(repository, list(_parse_tree(output, f"{folder}/" if folder else "")))


def find_paths(repository: Repository, commit: str, paths: Sequence[str]) -> list[Entry]:
    """The entries of the `paths` that exist, in the order of `paths`. `commit` is a sha: after the
    name of a branch, a path could mean something else to git."""
    paths = [path for path in paths if is_path(path)]
    found = look_up(repository, [f"{commit}:{path}" for path in paths])
    entries = []
    for path, item in zip(paths, found, strict=True):
        if item is not None and item[1] == "blob":
            entries.append(Entry(type="file", path=path, oid=item[0], size_bytes=item[2]))
        elif item is not None and item[1] == "tree":
            entries.append(Entry(type="directory", path=path, oid=item[0]))
    return _with_pointers(repository, entries)


def read_tree(repository: Repository, commit: str | None) -> Mapping[str, Entry]:
    """Every file and folder of the commit, by its path. Faster than `list_tree`, because it reads
    neither sizes nor pointers. Empty if `commit` is None."""
    if commit is None:
        return {}
    output = git(repository.folder, "ls-tree", "-z", "-r", "-t", commit)
    return {entry.path: entry for entry in _parse_tree(output, "")}


def changed_files(repository: Repository, before: str | None, after: str) -> list[Entry]:
    """The files and links of the commit `after` that `before` does not have, or has with other
    content. All of them if `before` is None."""
    commits = (before or _EMPTY_TREE, after)
    options = ("-r", "-z", "--no-renames", "--diff-filter=AMT")
    output = git(repository.folder, "diff-tree", *options, *commits)
    # Git prints two fields for each file: ":<mode> <mode> <sha> <sha> <letter>", and the path.
    fields = output.decode(errors="replace").split("\0")
    pairs = zip(fields[:-1:2], fields[1::2], strict=True)
    facts = [(path, *fact.split()[1:4:2]) for fact, path in pairs]
    sizes = look_up(repository, [oid for _, _, oid in facts])
    return [
        Entry(type="file", path=path, oid=oid, is_link=mode == "120000", size_bytes=found[2])
        for (path, mode, oid), found in zip(facts, sizes, strict=True)
        if found and found[1] == "blob"
    ]


def read_file(repository: Repository, file: Entry) -> bytes:
    """The complete content, which must fit into memory."""
    return git(repository.folder, "cat-file", "blob", file.oid)


def read_path(repository: Repository, commit: str, path: str) -> bytes:
    """The content of the small file at the path. Empty if there is no file."""
    found = find_paths(repository, commit, [path])
    return read_file(repository, found[0]) if found and found[0].type == "file" else b""


def _with_pointers(repository: Repository, entries: Sequence[Entry]) -> list[Entry]:
    pointers = pointers_of(repository, [(each.oid, "blob", each.size_bytes) for each in entries])
    return [replace(entry, lfs=pointers.get(entry.oid)) for entry in entries]


def _parse_tree(output: bytes, prefix: str) -> Iterator[Entry]:
    """The entries that `git ls-tree -z` printed, with `prefix` before each path. Leaves out
    submodules, and names that are not UTF-8 or have a control character. No client can ask for
    them, so a client that wants to download all listed files would fail. Raises RequestError
    if git printed sizes (`-l`) and an object is missing."""
    for record in output.split(b"\0"):
        facts, _, name = record.partition(b"\t")
        try:
            path = name.decode()
        except UnicodeDecodeError:
            continue
        if not is_path(path):
            continue
        mode, type, oid, *size = facts.decode().split()
        if type == "blob":
            if size == ["BAD"]:
                raise RequestError(
                    f"The repository is damaged: the object {oid} is missing. Restore it from a "
                    "backup, or push it from a clone that has it."
                )
            yield Entry(
                type="file",
                path=prefix + path,
                oid=oid,
                size_bytes=int(size[0]) if size else 0,
                is_executable=mode == "100755",
            )
        elif type == "tree":
            yield Entry(type="directory", path=prefix + path, oid=oid)


BRANCHES = "refs/heads/"
_ABBREVIATED = re.compile(r"[0-9a-f]{7,39}")
# 9999-12-31, the latest date that Python can represent. A commit may have a later date.
_LATEST_SECONDS = 253402300799


def resolve_revision(repository: Repository, revision: str) -> str:
    """The sha of the commit that `revision` names: a branch, a tag, a full ref, or a sha with 7
    digits or more. A commit is found by its sha even if no ref leads to it any more.

    Raises RevisionNotFound.
    """
    for found in look_up(repository, [f"{name}^{{commit}}" for name in _candidates(revision)]):
        if found is not None:
            return found[0]
    refs = read_refs(repository)
    branches = [ref.removeprefix(BRANCHES) for ref in refs if ref.startswith(BRANCHES)]
    if not branches:
        raise RevisionNotFound(
            f"The {repository.name} has no commit yet: push one with "
            f"`git push <this hub>/{repository.name.path} HEAD:main`."
        )
    raise RevisionNotFound(
        f"The {repository.name} has no branch, tag or commit {revision!r}: choose one of its "
        f"branches, such as {', '.join(branches[:10])}."
    )


def _candidates(revision: str) -> list[str]:
    if not is_ref_name(revision):
        return []
    if SHA.fullmatch(revision) or revision == "HEAD" or revision.startswith("refs/"):
        return [revision]
    names = [f"refs/heads/{revision}", f"refs/tags/{revision}"]
    return [*names, revision] if _ABBREVIATED.fullmatch(revision) else names


def have_equal_files(repository: Repository, one: str, other: str) -> bool:
    """Whether two commits have the same files."""
    trees = look_up(repository, [f"{each}^{{tree}}" for each in (one, other)])
    return trees[0] == trees[1]


def list_commits(repository: Repository, *commits: str, skip: int = 0, limit: int) -> list[Json]:
    """The commits that `commits` lead to, newest first, as the API describes them."""
    output = git(
        repository.folder,
        # Each field ends with a line feed, because neither an author's name nor a title can contain
        # one.
        *("log", "-z", "--encoding=UTF-8", "--format=%H%n%an%n%ct%n%s%n%b"),
        *(f"--skip={skip}", f"--max-count={limit}", *commits, "--"),
    )
    found: list[Json] = []
    for record in output.decode(errors="replace").split("\0"):
        if not record.strip():
            continue
        sha, author, seconds, title, message = record.split("\n", 4)
        found.append(
            {
                "id": sha,
                "title": title,
                "message": message.strip("\n"),
                "date": iso_time(min(int(seconds or 0), _LATEST_SECONDS)),
                "authors": [{"user": author}],
            }
        )
    return found


def older_commits(repository: Repository, *commits: str, limit: int) -> list[str]:
    """Where `list_commits` has stopped: from these commits, it goes on. To count commits from the
    newest one (`skip`) takes longer the more there are."""
    options = ("--boundary", f"--max-count={limit}")
    listed = lines_of(git(repository.folder, "rev-list", *options, *commits, "--"))
    return [line.removeprefix("-") for line in listed if line.startswith("-")]


def commit_of_line(repository: Repository, commit: str, path: str, line: int) -> str:
    """The commit that wrote this line (from 1) of a text file. Raises EntryNotFound."""
    place = (f"-L{line},{line}", commit, "--", path)
    told = git(repository.folder, "blame", "--porcelain", *place, may_exit_with=(128,))
    if not told:
        raise EntryNotFound(
            f"The {repository.name} has no line {line} of {path!r} in the commit {commit}.",
            commit=commit,
        )
    return told.split()[0].decode()


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


def large_file_paths(repository: Repository, commit: str, paths: Collection[str]) -> set[str]:
    """The paths among `paths` that the `.gitattributes` files of the commit mark as large files."""
    with tempfile.TemporaryDirectory() as folder:
        index = {"GIT_INDEX_FILE": f"{folder}/index"}
        git(repository.folder, "read-tree", commit, extra=index)
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
        answer = git(
            repository.folder,
            *(f"--work-tree={folder}", "check-ignore", "--no-index", "-z", "--stdin"),
            # With `./`, because git gives a colon at the beginning of a path a special meaning.
            stdin="".join(f"./{path}\0" for path in paths).encode(),
            may_exit_with=(1,),  # no path is ignored
            seconds=_MATCHING_SECONDS,
        )
    return {path.removeprefix("./") for path in answer.decode().split("\0")[:-1]}


def tracking_line(path: str) -> str:
    """The line of `.gitattributes` that makes only the file `path` a large file."""
    pattern = re.sub(r"([\\*?\[\]])", r"\\\1", path)
    # A space would end the pattern. (So would a tab or a newline, but no path has one.) White space
    # outside ASCII does not, and `[[:space:]]` does not match it, because git compares bytes.
    pattern = pattern.replace(" ", "[[:space:]]")
    return f"/{pattern} {_TRACKED}\n"


README = "README.md"


@dataclass(frozen=True, kw_only=True)
class Card:
    """The metadata in YAML at the beginning of a README."""

    metadata: Mapping[str, object] = field(default_factory=dict)
    """In the types of JSON. Empty if there is an error."""
    error: str | None = None

    def texts(self, key: str) -> list[str]:
        """The texts that the key has: one, several or none."""
        value = self.metadata.get(key)
        many = value if isinstance(value, list) else [value]
        return [item for item in many if isinstance(item, str)]


def parse_card(content: str) -> Card:
    """Reads the card from the text of a README. A long head is not read, because it takes seconds;
    it is not an error, because it may be right, for example if it lists many labels."""
    found = HEAD.match(content)
    if found is None or not found[2].strip() or len(found[2]) > MAX_HEAD_CHARACTERS:
        return Card()
    # The line feeds are there so that an error names the line of the README.
    text = "\n" * len(found[1].splitlines()) + found[2]
    try:
        metadata = to_jsonable_python(yaml.load(text, HeadLoader), inf_nan_mode="null")
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        # An explicit `!!int` before a word raises ValueError, and deep nesting RecursionError.
        return Card(error=f"the metadata is no YAML: {' '.join(str(error).split())}")
    if not isinstance(metadata, dict):
        return Card(error="the metadata must be a mapping, `key: value` lines")
    return Card(metadata=metadata)
