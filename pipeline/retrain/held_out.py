"""Chooses the rows of a text corpus that are held out, if neither the dataset nor the settings hold
out any. Held-out rows are measured, but never trained on.

Only the loss on unseen text shows whether a model generalises, and a corpus of 1,000 paragraphs can
spare 32 of them. The rows are chosen once, before the first training, and are recorded in a file. A
row that a later commit adds or edits is trained on. A row that was ever trained on is never held
out again.
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
"""The smallest and the largest number of held-out rows. With 32 rows, a comparison row by row
already shows a change of a few per cent. To measure 1,000 rows, the gate needs more than a
minute."""
FILE = "held_out.json"
"""The file that records the held-out rows. It is in the pipeline's folder of base models, which is
never deleted."""


class HeldOut(BaseModel):
    """Digests of rows that no release of this pipeline was trained on."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    digests: frozenset[str]


def draw(rows: Sequence[Row]) -> frozenset[str]:
    """Chooses rows to hold out: those with the lowest digests. Returns their digests. Empty if
    there are fewer than MIN_ROWS rows, or if not all rows are plain text."""
    if len(rows) < MIN_ROWS or any(row.text is None for row in rows):
        return frozenset()
    digests = sorted({row.digest for row in rows})
    size = min(max(AT_LEAST, round(RATIO * len(digests))), AT_MOST, len(digests) // 4)
    return frozenset(digests[:size])


def held_out_now(folder: Path | None, dataset: Dataset, settings: DataSettings) -> frozenset[str]:
    """Digests of the rows of the train split that a training of `dataset` would hold out. Reads the
    record in `folder`, and writes nothing."""
    if settings.held_out_ratio is not None:
        return frozenset(row.digest for row in split(dataset.train, settings.held_out_ratio)[1])
    if dataset.held_out:
        return frozenset()
    recorded = job_folder.read_record(folder / FILE, HeldOut) if folder is not None else None
    return recorded.digests if recorded is not None else draw(dataset.train)


def held_out_text(
    folder: Path,
    before: Sequence[Row] | None,
    rows: Sequence[Row],
    added: Iterable[Row],
    *,
    is_first: bool,
) -> frozenset[str]:
    """The digests of the rows among `rows` to hold out. Also records these digests in `folder`.

    before: the rows of the revision that the parent release was trained on. None if there is no
    such revision, or if it cannot be read any more. added: the rows that the commit adds or edits.
    is_first: whether there is no release that was trained on this dataset.
    """
    path = folder / FILE
    recorded = job_folder.read_record(path, HeldOut)
    if recorded is None:
        # If there is a parent release, it is older than the record. In its training, the rows with
        # the lowest digests were held out, and at least as many as `draw` chooses. So it was
        # trained on none of the chosen rows.
        digests = draw(rows if before is None else before)
    elif before is None:
        # Nobody knows which rows the commit adds. But none of them is in the record.
        digests = recorded.digests.intersection(row.digest for row in rows)
        if is_first and not digests:
            digests = draw(rows)
    else:
        digests = recorded.digests
    if before is not None:
        digests -= {row.digest for row in added}
    if recorded is None or recorded.digests != digests:
        folder.mkdir(parents=True, exist_ok=True)
        job_folder.write_record(path, HeldOut(digests=digests))
    return digests
