"""Reads the head of a card: the metadata in YAML at the beginning of a README. Anybody who may push
writes it, so a small or a large head must not take much memory or time."""

import re

import yaml

MAX_HEAD_CHARACTERS = 100_000
"""The hub does not read a longer head, because that would take seconds, and a client waits. A job
reads a head of any length."""
# The same expression as `huggingface_hub.repocard.REGEX_YAML_BLOCK`.
HEAD = re.compile(r"^(\s*---(?:\r\n|\r|\n))([\S\s]*?)((?:\r\n|\r|\n)---[ \t]*(\r\n|\n|$))")
"""Matches the head and the two lines around it. Its second group is the YAML."""


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
