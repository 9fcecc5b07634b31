"""The lines of `.gitattributes` that the hub writes, as git reads them."""

import subprocess
from pathlib import Path

import pytest

from pipeline.hub.contents import tracking_line


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
