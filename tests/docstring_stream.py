"""A dataset that lives: ten revisions of real text that is on every machine.

The rows are docstrings of the standard library, a file per module. Most start as their first
paragraph and are edited to the whole text later; modules are added, deleted and reordered.
"""

import ast
import json
import random
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

MIN_CHARACTERS, MAX_CHARACTERS = 40, 600
OTHERS = {"site-packages", "test", "tests", "idlelib", "lib2to3"}

Modules = dict[str, list[str]]


@dataclass(frozen=True, kw_only=True)
class Commit:
    change: str
    """What it does, in words."""
    files: dict[str, str]
    """All of them, by path."""


@cache
def modules() -> tuple[tuple[str, tuple[str, ...]], ...]:
    """The docstrings of each module of the standard library, in the order of its files."""
    library = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for path in sorted(library.glob("*.py")) + sorted(library.glob("[a-z]*/*.py")):
        if OTHERS.isdisjoint(path.parts) and (texts := tuple(_docstrings(path))):
            found.append((path.relative_to(library).with_suffix("").as_posix(), texts))
    return tuple(found)


def docstrings(limit: int) -> list[str]:
    """The first `limit` of them."""
    return [text for _, texts in modules() for text in texts][:limit]


def stream(num_rows: int, seed: int = 0) -> list[Commit]:
    """Ten revisions; the first holds about `num_rows` rows, later ones change a tenth."""
    chance = random.Random(seed)
    left = list(modules())
    chance.shuffle(left)
    held: Modules = {}
    commits = []

    def add(count: int) -> None:
        while count > 0:
            module, texts = left.pop()
            held[module] = [_first_paragraph(text) for text in texts]
            whole[module] = list(texts)
            count -= len(texts)

    def edit(count: int) -> None:
        stubs = [
            (module, number)
            for module, texts in held.items()
            for number, text in enumerate(texts)
            if text != whole[module][number]
        ]
        for module, number in chance.sample(stubs, min(count, len(stubs))):
            held[module][number] = whole[module][number]

    def delete(count: int) -> None:
        while count > 0:
            count -= len(held.pop(chance.choice(sorted(held))))

    def reorder() -> None:
        for module in held:
            order = list(range(len(held[module])))
            chance.shuffle(order)
            held[module] = [held[module][number] for number in order]
            whole[module] = [whole[module][number] for number in order]

    def commit(change: str) -> None:
        commits.append(Commit(change=change, files={f"{m}.jsonl": _jsonl(held[m]) for m in held}))

    whole: Modules = {}
    tenth = num_rows // 10
    add(num_rows)
    edit(num_rows // 2)
    commit("first")
    for change in (
        "add",
        "add and edit",
        "reorder",
        "add",
        "delete",
        "add and edit",
        "add and reorder",
        "edit",
        "add",
    ):
        if "add" in change:
            add(tenth)
        if "edit" in change:
            edit(tenth)
        if "delete" in change:
            delete(tenth)
        if "reorder" in change:
            reorder()
        commit(change)
    return commits


def _docstrings(path: Path) -> Iterable[str]:
    try:
        tree = ast.parse(path.read_bytes())
    except SyntaxError:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text and MIN_CHARACTERS <= len(text) <= MAX_CHARACTERS:
                yield text


def _first_paragraph(text: str) -> str:
    return text.partition("\n\n")[0]


def _jsonl(texts: Iterable[str]) -> str:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)
