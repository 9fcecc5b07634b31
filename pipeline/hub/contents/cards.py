"""Reads the card of a repository: metadata in YAML at the beginning of its README."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import yaml
from pydantic_core import to_jsonable_python

from pipeline.formats import HEAD, MAX_HEAD_CHARACTERS, HeadLoader

README = "README.md"


@dataclass(frozen=True, kw_only=True)
class Card:
    metadata: Mapping[str, object] = field(default_factory=dict)
    """In the types of JSON."""
    errors: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    def texts(self, key: str) -> list[str]:
        """The texts that the key has: one, several or none."""
        value = self.metadata.get(key)
        many = value if isinstance(value, list) else [value]
        return [item for item in many if isinstance(item, str)]


def parse_card(content: str) -> Card:
    """Reads the card from the text of a README."""
    found = HEAD.match(content)
    if found is None or not found[2].strip():
        return Card(warnings=("empty or missing yaml metadata in repo card",))
    if len(found[2]) > MAX_HEAD_CHARACTERS:
        # Not an error: the metadata may be right, for example if it lists many labels.
        reason = (
            f"the metadata has more than {MAX_HEAD_CHARACTERS} characters, so this hub does not "
            "read it: lists show the repository without its tags"
        )
        return Card(warnings=(reason,))
    # The line feeds are there so that an error names the line of the README.
    text = "\n" * len(found[1].splitlines()) + found[2]
    try:
        metadata = to_jsonable_python(yaml.load(text, HeadLoader), inf_nan_mode="null")
    except RecursionError:
        return Card(errors=("the metadata is nested too deeply",))
    except yaml.MarkedYAMLError as error:
        line = f" (line {error.problem_mark.line + 1})" if error.problem_mark else ""
        return Card(errors=(f"the metadata is no YAML: {error.problem}{line}",))
    except (yaml.YAMLError, ValueError) as error:
        # An explicit `!!int` before a word raises ValueError, for example.
        return Card(errors=(f"the metadata is no YAML: {error}",))
    if not isinstance(metadata, dict):
        return Card(errors=("the metadata must be a mapping, `key: value` lines",))
    return Card(metadata=metadata)
