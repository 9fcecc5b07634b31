"""Two formats of files in a repository that both the hub and the jobs read.

A *pointer* of Git LFS is the small file that git stores in place of a large file. The format:
https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md

The *head* of a card is the metadata in YAML at the beginning of a README. Anybody who may push
writes it, so a small or a large head must not take much memory or time.
"""

import re
from dataclasses import dataclass

import yaml

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

MAX_HEAD_CHARACTERS = 100_000
"""The hub does not read a longer head, because that would take seconds, and a client waits. A job
reads a head of any length."""
# The same expression as `huggingface_hub.repocard.REGEX_YAML_BLOCK`.
HEAD = re.compile(r"^(\s*---(?:\r\n|\r|\n))([\S\s]*?)((?:\r\n|\r|\n)---[ \t]*(\r\n|\n|$))")
"""Matches the head and the two lines around it. Its second group is the YAML."""


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


class HeadLoader(yaml.SafeLoader):  # type: ignore[misc]
    """The YAML loader of heads. CSafeLoader is not used, because deep nesting overflows its stack
    and ends the process.

    This loader refuses aliases, because a few lines with aliases can become gigabytes.
    """

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            raise yaml.composer.ComposerError(
                None, None, "aliases (`*name`) are refused: repeat the value", event.start_mark
            )
        node: yaml.Node | None = super().compose_node(parent, index)
        return node


# Dates are read as text: JSON has no dates, and an impossible date would be an error.
HeadLoader.yaml_implicit_resolvers = {
    first: [(tag, form) for tag, form in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
