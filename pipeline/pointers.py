"""Pointers of Git LFS: the small files that git stores in place of large ones.

The format: https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md
"""

import re
from dataclasses import dataclass

OID = re.compile(r"[0-9a-f]{64}")
"""The sha256 of a large file, as every part of the protocol writes it."""
MAX_POINTER_BYTES = 1024
"""Git LFS never reads a larger file as a pointer."""
MIN_POINTER_BYTES = 126

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
        """None for a file that is no pointer; a file that is nearly one is none."""
        if len(content) > MAX_POINTER_BYTES:
            return None
        found = _POINTER.fullmatch(content)
        return None if found is None else cls(oid=found[1].decode(), size=int(found[2]))

    def render(self) -> bytes:
        """As `git lfs` writes it, so that a commit through the API and one by git are the same."""
        return (
            f"version https://git-lfs.github.com/spec/v1\noid sha256:{self.oid}\nsize {self.size}\n"
        ).encode()


def may_be_pointer(num_bytes: int) -> bool:
    """Whether a file of this size is worth a look."""
    # The last line may lack its newline.
    return MIN_POINTER_BYTES - 1 <= num_bytes <= MAX_POINTER_BYTES
