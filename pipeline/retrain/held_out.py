"""The share of a text corpus that is held out where nobody holds anything out.

Loss on unseen text is the one thing that tells whether a model of text generalises, and of 1,000
paragraphs 32 can be spared. They are drawn once, before the first training, and recorded: a row
that a commit adds or edits is trained on, and what was ever trained on is no longer held out.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from pipeline.retrain import job_folder
from pipeline.retrain.dataset import Dataset
from pipeline.retrain.rows import Row, split
from pipeline.retrain.settings import DataSettings

MIN_ROWS = 1_000
RATIO = 0.02
AT_LEAST, AT_MOST = 32, 1_000
"""Compared row by row, 32 show a change of a few per cent, and 1,000 are more than a gate measures
in a minute."""
FILE = "held_out.json"
"""In the pipeline's folder of base models, which is kept for good."""


class HeldOut(BaseModel):
    """Digests of rows that no release of this pipeline was trained on."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    digests: frozenset[str]


def draw(rows: Sequence[Row]) -> frozenset[str]:
    """The digests of a share of the rows, the lowest ones; none where there are few rows, or rows
    that are more than text."""
    if len(rows) < MIN_ROWS or any(row.text is None for row in rows):
        return frozenset()
    digests = sorted({row.digest for row in rows})
    size = min(max(AT_LEAST, round(RATIO * len(digests))), AT_MOST, len(digests) // 4)
    return frozenset(digests[:size])


def held_out_now(folder: Path | None, dataset: Dataset, settings: DataSettings) -> frozenset[str]:
    """Digests of the rows of the training split that a training of `dataset` would hold out, going
    by what is recorded in `folder`."""
    if settings.held_out_ratio is not None:
        return frozenset(row.digest for row in split(dataset.train, settings.held_out_ratio)[1])
    if dataset.held_out:
        return frozenset()
    recorded = job_folder.read_record(folder / FILE, HeldOut) if folder is not None else None
    return recorded.digests if recorded is not None else draw(dataset.train)


def held_out_text(
    folder: Path, before: Sequence[Row] | None, rows: Sequence[Row], added: Iterable[Row]
) -> frozenset[str]:
    """The digests of the rows to hold out of `rows`, which is recorded in `folder`.

    before: the rows that the parent release knows; None where there is no such release, and the
    share is drawn anew. added: what the commit adds or edits.
    """
    path = folder / FILE
    recorded = job_folder.read_record(path, HeldOut)
    if before is None:
        digests = draw(rows)
    elif recorded is None:
        # Releases from before this record held out the lowest digests of all rows, and more.
        digests = draw(before)
    else:
        digests = recorded.digests
    if before is not None:
        digests -= {row.digest for row in added}
    if recorded is None or recorded.digests != digests:
        folder.mkdir(parents=True, exist_ok=True)
        job_folder.write_record(path, HeldOut(digests=digests))
    return digests
