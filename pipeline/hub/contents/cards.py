"""Reads the card of a repository: metadata in YAML at the beginning of its README. Finds errors in
the card."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import yaml

from pipeline.card_head import HEAD, MAX_HEAD_CHARACTERS, HeadLoader
from pipeline.hub.git.process import git

README = "README.md"

_TEXTS = ("license_name", "license_link", "pretty_name", "pipeline_tag", "library_name")
_LISTS = ("tags",)
_TEXT_OR_LIST = ("license", "language", "task_categories", "task_ids", "datasets", "metrics")


@dataclass(frozen=True, kw_only=True)
class Card:
    metadata: Mapping[str, object] = field(default_factory=dict)
    errors: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    def texts(self, key: str) -> list[str]:
        """The texts that the key has: one, several or none."""
        value = self.metadata.get(key)
        many = value if isinstance(value, list) else [value]
        return [item for item in many if isinstance(item, str)]


def parse_card(content: str) -> Card:
    """Reads the card from the text of a README. If an error is in one line, its message names this
    line of the README."""
    found = HEAD.match(content)
    if found is None or not found[2].strip():
        return Card(warnings=("empty or missing yaml metadata in repo card",))
    text = found[2]
    if len(text) > MAX_HEAD_CHARACTERS:
        # Not an error: the metadata may be right, for example if it lists many labels.
        reason = (
            f"the metadata has more than {MAX_HEAD_CHARACTERS} characters, so this hub does not "
            "read it: lists show the repository without its tags"
        )
        return Card(warnings=(reason,))
    lines_before = len(found[1].splitlines())
    try:
        metadata = _plain(yaml.load(text, HeadLoader))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = "" if mark is None else f" (line {mark.line + lines_before + 1})"
        reason = error.problem or error.context or "it cannot be read"
        return Card(errors=(f"the metadata is no YAML: {reason}{where}",))
    except RecursionError:
        return Card(errors=("the metadata is nested too deeply",))
    except (yaml.YAMLError, ValueError) as error:
        # An explicit `!!int` before a word raises ValueError, for example.
        return Card(errors=(f"the metadata is no YAML: {error}",))
    if not isinstance(metadata, dict):
        return Card(errors=("the metadata must be a mapping, `key: value` lines",))
    return Card(metadata=metadata, errors=tuple(_wrong(metadata, text, lines_before)))


def _plain(value: object) -> object:
    """The value in the types of JSON. Keys become text, and so do values whose type JSON lacks."""
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _wrong(metadata: Mapping[str, object], text: str, lines_before: int) -> Iterator[str]:
    for key, value in metadata.items():
        is_text = isinstance(value, str)
        is_list = isinstance(value, list) and all(isinstance(item, str) for item in value)
        if value is None:
            continue
        if key in _TEXTS and not is_text:
            kind = "a text"
        elif key in _LISTS and not is_list:
            kind = "a list of texts"
        elif key in _TEXT_OR_LIST and not (is_text or is_list):
            kind = "a text or a list of texts"
        else:
            continue
        lines = enumerate(text.splitlines(), lines_before + 1)
        line = next((number for number, each in lines if each.startswith(f"{key}:")), None)
        where = "" if line is None else f" (line {line})"
        yield f'"{key}" must be {kind}; put quotes around numbers, yes and no{where}'


@lru_cache(maxsize=1000)
def read_card(folder: Path, oid: str) -> Card:
    """The card of the README whose blob is `oid`, in the repository in `folder`. The result can be
    cached, because a blob never changes."""
    return parse_card(git(folder, "cat-file", "blob", oid).decode(errors="replace"))
