"""Reads and writes pointers of Git LFS: the small files that git stores in place of large files.

The format: https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md
"""

import re
from dataclasses import dataclass

OID = re.compile(r"[0-9a-f]{64}")
"""Matches the id of a large file: the sha256 of its content, as hex digits in lower case."""
MAX_POINTER_BYTES = 1024
"""Git LFS does not treat a larger file as a pointer."""
MIN_POINTER_BYTES = 126
"""The size of the shortest pointer, with the newline at its end."""

_POINTER = re.compile(
    rb"version https://git-lfs\.github\.com/spec/v1\n"
    rb"(?:ext-\d-[\w.-]+ sha256:[0-9a-f]{64}\n)*"
    rb"oid sha256:([0-9a-f]{64})\n"
    rb"size (0|[1-9]\d{0,17})\n?"
)


@dataclass(frozen=True, kw_only=True)
class Pointer:
    oid: str
    size: int

    @classmethod
    def parse(cls, content: bytes) -> "Pointer | None":
        """Read the content of a file. Returns None if the content is not a pointer. The newline at
        the end of a pointer may be missing. Also returns None for a pointer of the pre-release of
        Git LFS, which has another URL in its first line."""
        if len(content) > MAX_POINTER_BYTES:
            return None
        found = _POINTER.fullmatch(content)
        return None if found is None else cls(oid=found[1].decode(), size=int(found[2]))

    def render(self) -> bytes:
        """The content of the pointer file, in exactly the form that `git lfs` writes if it uses no
        extensions. So git stores the same pointer for a large file, whether the API or `git push`
        uploaded the file."""
        return (
            f"version https://git-lfs.github.com/spec/v1\noid sha256:{self.oid}\nsize {self.size}\n"
        ).encode()


def may_be_pointer(num_bytes: int) -> bool:
    """Whether a file of this size can be a pointer. If not, there is no need to read the file."""
    # Subtract one, because a pointer may have no newline at its end.
    return MIN_POINTER_BYTES - 1 <= num_bytes <= MAX_POINTER_BYTES
