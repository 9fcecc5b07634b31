"""What git takes in a push, however odd it is, keeps no reader out of the repository."""

import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest
from huggingface_hub import GitRefs, HfFileSystem
from huggingface_hub.hf_api import GitCommitInfo

from tests.hub_fixtures import RunningHub, running_hub

_numbers = count()
BY = "Ada <ada@example.org> 1700000000 +0000"


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningHub]:
    with running_hub(tmp_path_factory.mktemp("hub")) as hub:
        yield hub


@dataclass(frozen=True)
class Odd:
    """A new dataset, and a repository to push to it from."""

    hub: RunningHub
    folder: Path
    id: str

    def git(self, *arguments: str | bytes, stdin: bytes = b"") -> str:
        done = subprocess.run(
            ["git", *arguments],
            cwd=self.folder,
            env=self.hub.git_env,
            input=stdin,
            capture_output=True,
        )
        assert done.returncode == 0, done.stderr.decode(errors="replace")
        return done.stdout.decode().strip()

    def tree(self, *entries: bytes) -> str:
        """Of lines such as `100644 blob SHA\\tname`; any byte but NUL may be in the name."""
        return self.git("mktree", "-z", "--missing", stdin=b"".join(e + b"\0" for e in entries))

    def blob(self, content: bytes) -> bytes:
        return self.git("hash-object", "-w", "--stdin", stdin=content).encode()

    def commit(self, tree: str, *, author: str = BY, message: bytes = b"odd\n") -> str:
        head = f"tree {tree}\nauthor {author}\ncommitter {BY}\n\n".encode()
        return self.git("hash-object", "-w", "-t", "commit", "--stdin", stdin=head + message)

    def push(self, sha: str, *refs: str) -> None:
        self.git("push", "-q", "origin", *(f"{sha}:{ref}" for ref in refs or ("refs/heads/main",)))


@pytest.fixture
def odd(hub: RunningHub, tmp_path: Path) -> Odd:
    id = f"local/odd{next(_numbers)}"
    folder = tmp_path / "pushed"
    hub.git("init", "-q", str(folder), cwd=tmp_path)
    hub.git("remote", "add", "origin", hub.create_dataset(id), cwd=folder)
    return Odd(hub, folder, id)


def read(odd: Odd, tmp_path: Path) -> tuple[dict[str, int], GitRefs, list[GitCommitInfo]]:
    """Through every route that reads: the files and their sizes, the refs, the commits."""
    api, options = odd.hub.api, {"repo_type": "dataset"}
    info = api.dataset_info(odd.id, files_metadata=True)
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or []}
    assert info.sha is not None
    entries = list(api.list_repo_tree(odd.id, recursive=True, **options))  # type: ignore[arg-type]
    files = [entry.path for entry in entries if hasattr(entry, "size")]
    assert files == list(sizes)
    found = api.get_paths_info(odd.id, [entry.path for entry in entries], **options)  # type: ignore[arg-type]
    assert [one.path for one in found] == [entry.path for entry in entries]
    for entry in entries:
        if not hasattr(entry, "size"):
            assert list(api.list_repo_tree(odd.id, entry.path, **options))  # type: ignore[arg-type]
    snapshot = api.snapshot_download(odd.id, cache_dir=tmp_path / "cache", **options)  # type: ignore[call-overload]
    assert {path: (Path(snapshot) / path).stat().st_size for path in files} == sizes
    fs = HfFileSystem(endpoint=odd.hub.url, token=odd.hub.token)
    fs.invalidate_cache()
    assert sorted(fs.find(f"datasets/{odd.id}")) == sorted(
        f"datasets/{odd.id}/{path}" for path in files
    )
    odd.hub.git("clone", "-qn", f"{odd.hub.url}/datasets/{odd.id}", "copy", cwd=tmp_path)
    assert odd.id in [one.id for one in api.list_datasets()]
    refs = api.list_repo_refs(odd.id, **options)  # type: ignore[arg-type]
    commits = api.list_repo_commits(odd.id, **options)  # type: ignore[arg-type]
    return sizes, refs, commits


@pytest.mark.parametrize(
    ("author", "told"),
    [
        ("a\x1fb", "a\x1fb"),
        ("\x1f", "\x1f"),
        ("a\x1eb\x85c\u2028d", "a\x1eb\x85c\u2028d"),
        ("\t", ""),
        ("", ""),
    ],
)
def test_an_author_may_have_any_character(odd: Odd, tmp_path: Path, author: str, told: str) -> None:
    tree = odd.tree(b"100644 blob %s\ta.txt" % odd.blob(b"1"))
    odd.push(odd.commit(tree, author=f"{author} <ada@example.org> 1700000000 +0000"))
    sizes, _, [commit] = read(odd, tmp_path)
    assert sizes == {"a.txt": 1}
    assert (commit.authors, commit.title) == ([told], "odd")


def test_a_message_may_have_any_byte_but_nul(odd: Odd, tmp_path: Path) -> None:
    tree = odd.tree(b"100644 blob %s\ta.txt" % odd.blob(b"1"))
    odd.push(odd.commit(tree, message=b"a\x1f\x1eb \xff\n\nbody\x1d\n"))
    _, _, [commit] = read(odd, tmp_path)
    assert (commit.title, commit.message) == ("a\x1f\x1eb \ufffd", "body\x1d")
    hidden = odd.commit(tree, message=b"a\x00hidden\n")
    with pytest.raises(AssertionError, match="NUL byte in the commit object body"):
        odd.push(hidden, "refs/heads/other")


def test_a_file_may_have_any_name(odd: Odd, tmp_path: Path) -> None:
    blob = odd.blob(b"row\n")
    names = ["back\\slash", "line\u2028end", "\x85", " ", "é", 'q"', "%2e"]
    odd_names = [b"n\xe9", b"a\nb", b"tab\t", b"a\rb"]
    inner = odd.tree(*(b"100644 blob %s\t%s" % (blob, name.encode()) for name in sorted(names)))
    left_out = (b"100644 blob %s\t%s" % (blob, name) for name in odd_names)
    odd.push(odd.commit(odd.tree(b"040000 tree %s\tfolder" % inner.encode(), *left_out)))
    sizes, _, _ = read(odd, tmp_path)
    # Without the names that are not UTF-8 or have a control character, for which no client can ask.
    assert sizes == {f"folder/{name}": 4 for name in names}


def test_submodules_are_left_out_and_links_are_files(odd: Odd, tmp_path: Path) -> None:
    first = odd.commit(odd.tree(b"100644 blob %s\ta.txt" % odd.blob(b"1")))
    tree = odd.tree(
        b"120000 blob %s\tlink" % odd.blob(b"../../../etc/passwd"),
        b"160000 commit %s\tmodule" % first.encode(),
        b"160000 commit %s\tunknown" % (b"1" * 40),
    )
    odd.push(odd.commit(tree))
    assert read(odd, tmp_path)[0] == {"link": 19}
    path = odd.hub.api.hf_hub_download(
        odd.id, "link", repo_type="dataset", cache_dir=tmp_path / "other"
    )
    assert Path(path).read_text() == "../../../etc/passwd"
    for name in ("module", "unknown", "module/a.txt"):
        assert not odd.hub.api.file_exists(odd.id, name, repo_type="dataset")


def test_refs_may_have_odd_names_and_tags_may_name_anything(odd: Odd, tmp_path: Path) -> None:
    tree = odd.tree(b"100644 blob %s\ta.txt" % odd.blob(b"1"))
    commit = odd.commit(tree)
    odd.push(commit, "refs/heads/main", "refs/heads/line\u2028end", "refs/tags/x\x85y")
    odd.push(tree, "refs/tags/of-a-folder")
    odd.push(odd.blob(b"1").decode(), "refs/tags/of-a-file")
    for name in ("n\udce9", "n\udcea"):  # Two bytes that are no UTF-8.
        odd.git("push", "-q", "origin", os.fsencode(f"{commit}:refs/heads/{name}"))
    odd.git("push", "-q", "origin", ":refs/tags/of-a-folder")
    _, refs, _ = read(odd, tmp_path)
    assert {ref.name for ref in refs.branches} == {"main", "line\u2028end", r"n\xe9", r"n\xea"}
    assert [(ref.name, ref.target_commit) for ref in refs.tags] == [("x\x85y", commit)]
    found = odd.hub.api.dataset_info(odd.id, revision="line\u2028end")
    assert found.sha == commit
    assert not odd.hub.api.revision_exists(odd.id, "of-a-file", repo_type="dataset")


def test_a_repository_may_have_many_refs(odd: Odd, tmp_path: Path) -> None:
    commit = odd.commit(odd.tree(b"100644 blob %s\ta.txt" % odd.blob(b"1")))
    names = [f"refs/tags/t{number}" for number in range(300)]
    lines = "".join(f"create {name} {commit}\n" for name in [*names, "refs/heads/main"])
    odd.git("update-ref", "--stdin", stdin=lines.encode())
    odd.git("push", "-q", "--mirror", "origin")
    # git stores each ref of a push in a file of its own and waits for the disk: 10,000 of them take
    # minutes. So these come as `git pack-refs` would have left them.
    packed = "".join(f"{commit} refs/tags/u{number:05}\n" for number in range(9_700))
    stored = odd.hub.folder(odd.id)
    (stored / "packed-refs").write_text(f"# pack-refs with: peeled fully-peeled sorted \n{packed}")
    _, refs, _ = read(odd, tmp_path)
    assert len(refs.tags) == 10_000
