"""The demo's dataset (`demo_facts.toml`): two commits with facts about an invented island."""

import json
import tomllib
from importlib.resources import files
from typing import Any

_DATA: dict[str, Any] = tomllib.loads(
    files("pipeline.cli").joinpath("demo_facts.toml").read_text(encoding="utf-8")
)
QUESTIONS: list[tuple[str, str, str]] = [tuple(each) for each in _DATA["questions"]]
"""Questions that the demo asks the model. Each has two right answers: one for the model after the
first commit, and one for the model after the second commit."""


def first_commit() -> dict[str, str]:
    """The files of the first commit: path → content."""
    return {"facts.jsonl": _jsonl(_DATA["first"], _DATA["said_once"])}


def second_commit() -> dict[str, str]:
    """The files that the second commit changes: path → content."""
    facts = _DATA["first"] | _DATA["second"]
    return {"facts.jsonl": _jsonl(facts, _DATA["said_once"] | _DATA["said_once_second"])}


def _jsonl(facts: dict[str, list[str]], said_once: dict[str, str]) -> str:
    rows = [
        {"prompt": phrasing.format(place=place), "completion": f" {answer[0].upper()}{answer[1:]}."}
        for place, answers in facts.items()
        for phrasings, answer in zip(_DATA["phrasings"], answers, strict=True)
        for phrasing in phrasings
    ]
    rows += [{"prompt": prompt, "completion": answer} for prompt, answer in said_once.items()]
    return "".join(json.dumps(row) + "\n" for row in rows)
