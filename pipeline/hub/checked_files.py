"""Lets git check the files of a commit that git itself reads, such as `.gitmodules`.

Git checks these files in a push, but `git fast-import`, which makes the commits of the API, does
not. A wrong `.gitmodules` may harm a person who clones the repository. And nobody could push a
history with such a file to another server that checks it.
"""

import re
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from pipeline.hub.errors import BadRequest
from pipeline.hub.git_process import git

_BATCH_BYTES = 16 * 1024 * 1024
# Also matches names that other file systems read as the same file, such as `GITMOD~1`.
_CHECKED = re.compile(r"\W*\.git\W*(modules|attributes).*|gi.*~.*", re.IGNORECASE | re.DOTALL)


def check_files(files: Iterable[tuple[str, Callable[[], bytes]]]) -> None:
    """Raises BadRequest if git would refuse one of the files in a push. `files` are paths, each
    with a function that returns the content; it is called only for names that git itself reads."""
    batch: list[tuple[str, bytes]] = []
    num_bytes = 0
    for path, read in files:
        if _CHECKED.fullmatch(path.rpartition("/")[2]):
            batch.append((path, read()))
            num_bytes += len(batch[-1][1])
        if num_bytes > _BATCH_BYTES:
            _check(batch)
            batch, num_bytes = [], 0
    if batch:
        _check(batch)


def _check(files: list[tuple[str, bytes]]) -> None:
    with tempfile.TemporaryDirectory() as place:
        # In a new repository, so that git checks only these files.
        folder = Path(place)
        git(folder, "init", "--quiet", "--bare", "--template=")
        stream = [b"commit refs/heads/main\ncommitter hub <hub@localhost> 0 +0000\ndata 0\n"]
        for number, (path, content) in enumerate(files):
            name = path.rpartition("/")[2].replace("\\", "\\\\").replace('"', '\\"')
            stream.append(f'M 100644 inline "{number}/{name}"\ndata {len(content)}\n'.encode())
            stream += [content, b"\n"]
        git(folder, "fast-import", "--quiet", stdin=b"".join(stream))
        complaints: list[str] = []
        git(folder, "fsck", "--no-dangling", may_exit_with=range(1, 256), complaints=complaints)
    errors = [line.partition(": ")[2] for line in complaints if line.startswith("error in ")]
    if errors:
        names = ", ".join(repr(path) for path, _ in files[:5])
        raise BadRequest(
            f"Git refuses {names} in a push: {'; '.join(errors[:5])}. Correct the file."
        )
