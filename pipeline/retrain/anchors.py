"""Anchors: everyday prompts that show what a base model knew before it was trained here.

The base model answers them once. The answers to some anchors are mixed into training, so that the
model keeps them. The other anchors are never trained on. They show how far the answers have drifted
(moved away from those of the base model).
"""

import codecs
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pipeline.retrain.errors import DataError

PACKAGED = Path(__file__).with_name("anchors.jsonl")
FORM = '`{"kind": "poem", "measured": true, "prompt": "Write a haiku about snow."}`'


class Anchor(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    kind: str = Field(min_length=1)
    """The kind of task, such as "poem". Either all anchors of a kind are measured, or none."""
    measured: bool
    """Whether the drift is measured on this anchor. If so, it is never trained on."""
    prompt: str = Field(min_length=1)
    """A question or the beginning of a text. With a chat template, it is the message of the user.
    Without one, the model continues it."""


def load_anchors(path: Path | None = None) -> tuple[Anchor, ...]:
    """The anchors in the `.jsonl` file `path`. If it is None, those in the package. Raises
    DataError.

    It is an error if only some anchors of a kind are measured. Training on one prompt of a kind
    also keeps the answers to other prompts of this kind. So the measured drift would be smaller
    than the real one.
    """
    path = path or PACKAGED
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError.at(
            path, None, f"cannot be read ({error.strerror}); write lines as {FORM}"
        ) from error
    anchors: list[Anchor] = []
    measured: dict[str, bool] = {}
    for line, text in enumerate(content.removeprefix(codecs.BOM_UTF8).splitlines(), start=1):
        if not text.strip():
            continue
        try:
            anchor = Anchor.model_validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            where = "".join(f"`{name}`: " for name in first["loc"])
            problem = f"{where}{first['msg']}; an anchor is {FORM}"
            raise DataError.at(path, line, problem) from error
        if measured.setdefault(anchor.kind, anchor.measured) != anchor.measured:
            raise DataError.at(
                path,
                line,
                f"of the kind {anchor.kind!r} some anchors are measured and some are trained on; "
                "give one of the two another kind",
            )
        anchors.append(anchor)
    if not anchors:
        raise DataError.at(path, None, f"holds no anchor; write lines as {FORM}")
    return tuple(anchors)
