"""Deltas learn what full retrainings learn, for a quarter of the tokens, and forget nothing."""

from pathlib import Path

import pytest

from tests.docstring_stream import stream
from tests.learning_stream import follow, table
from tests.retrain_fixtures import tiny_preset

__all__ = ["tiny_preset"]

TRAIN = {"max_tokens": 40_000, "learning_rate": 4e-3}
LAST_DELTA = 4


@pytest.mark.slow
def test_deltas_keep_up_with_a_full_retraining(tmp_path: Path) -> None:
    found = list(follow(tmp_path, stream(600)[:5], compared=(LAST_DELTA,), train=TRAIN))
    shown = table(found)
    assert [row.mode for row in found] == ["full", "delta", "delta", "", "delta"], shown
    assert [row.result for row in found] == [
        *("published", "published", "published", "unchanged", "published")
    ], shown
    for row in found:
        assert row.not_trained == 0, shown
        if row.mode == "delta":
            assert row.old_change <= 0.02, shown
            assert row.new_loss < 0.99 * row.new_loss_before, shown
    last = found[LAST_DELTA]
    assert last.share_of_tokens <= 0.25, shown
    assert last.against_full <= 0.01, shown
