"""Names from outside, as the hub takes and refuses them, and as its lines of `.gitattributes` give
them to git."""

import subprocess
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pipeline.hub.contents import tracking_line
from pipeline.hub.errors import BadRequest
from pipeline.hub.repositories import (
    changed_path,
    is_ref_name,
    new_file_path,
    repository_name,
)


@pytest.mark.parametrize("name", ["facts", "a", "A_b-c.d", "0", "x" * 96])
def test_usual_names_are_taken(name: str) -> None:
    assert repository_name("dataset", "local", name).path == f"datasets/local/{name}"
    assert repository_name("model", "local", name).path == f"local/{name}"


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a..b", "a--b", ".a", "-a", "a-", "a.git", "a/b", "a\nb", "é", "x" * 97]
)
def test_names_that_could_lead_elsewhere_are_refused(name: str) -> None:
    with pytest.raises(BadRequest, match="repository name"):
        repository_name("dataset", "local", name)
    with pytest.raises(BadRequest, match="repository name"):
        repository_name("dataset", name, "facts")


@given(st.text())
@example("../../etc/passwd")
@example("a/./b")
@example("a\0b")
def test_a_file_path_never_leads_out(path: str) -> None:
    try:
        taken = changed_path(path)
    except BadRequest:
        return
    assert taken == path
    assert not {"", ".", ".."} & set(taken.split("/"))
    assert "\n" not in taken and "\0" not in taken


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("index")
    subprocess.run(["git", "-C", folder, "init", "-q", "--bare"], check=True)
    return folder


@given(st.text(r".gitGT~1\\/: x", min_size=4, max_size=12))
@example(r"a\.git\x")
@example(r".git\x")
@example(r"a\GIT~1 .")
@example(".git:x")
@example("~/.git ./x")
def test_a_path_taken_for_a_file_can_be_cloned(index: Path, path: str) -> None:
    try:
        taken = new_file_path(path)
    except BadRequest:
        return
    entry = f"100644,e69de29bb2d1d6434b8b29ae775ad8c2e48c5391,{taken}"
    checked = subprocess.run(
        ["git", "-C", index, "update-index", "--add", "--replace", "--cacheinfo", entry]
    )
    assert checked.returncode == 0


@pytest.mark.parametrize("path", [".gitmodules", "a/.GITMODULES", "a\\gitmod~1"])
def test_submodules_come_only_by_a_push(path: str) -> None:
    with pytest.raises(BadRequest, match="by a push with git"):
        new_file_path(path)


@given(st.text(st.characters(max_codepoint=0x17F), min_size=1, max_size=12))
@example("a.lock/b")
@example("@{1}")
@example("main~1")
@example("a//b")
@example("@")
def test_a_name_taken_for_a_ref_is_one_for_git_too(name: str) -> None:
    if not is_ref_name(name):
        return
    checked = subprocess.run(["git", "check-ref-format", f"refs/heads/{name}"])
    assert checked.returncode == 0


@pytest.mark.parametrize(
    ("name", "fits"),
    [
        (f"{'x' * 250}/{'x' * 250}", True),
        (f"a/{'x' * 251}", False),
        ("é" * 126, False),
    ],
    ids=["two-parts", "long-part", "bytes"],
)
def test_a_ref_is_a_file_of_a_name_that_is_not_too_long(
    name: str, fits: bool, tmp_path: Path
) -> None:
    assert is_ref_name(name) == fits
    if fits:
        git = ("git", "-C", tmp_path)
        subprocess.run([*git, "init", "-q", "--bare"], check=True)
        tree = subprocess.run([*git, "mktree"], input=b"", capture_output=True, check=True)
        sha = tree.stdout.decode().strip()
        subprocess.run([*git, "update-ref", f"refs/tags/{name}", sha], check=True)


@pytest.mark.parametrize(
    "path",
    [
        *("a b/c d.bin", "no\u00a0break.bin", "wide\u3000space.bin", "line\u2028.bin"),
        *("[1]*?.bin", "back\\slash.bin", "#a", "!a", '"a"', " a "),
    ],
)
def test_a_line_makes_its_file_a_large_file_and_no_other(path: str, tmp_path: Path) -> None:
    (tmp_path / ".gitattributes").write_text(tracking_line(path))
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    asked = [path, path.replace("a", "b"), f"x/{path}", path.replace("1", "2")]
    found = subprocess.run(
        ["git", "check-attr", "-z", "--stdin", "filter"],
        cwd=tmp_path,
        input="".join(f"{each}\0" for each in asked).encode(),
        capture_output=True,
        check=True,
    )
    fields = found.stdout.decode().split("\0")
    values = dict(zip(fields[::3], fields[2::3], strict=False))
    assert values == {each: "lfs" if each == path else "unspecified" for each in asked}
