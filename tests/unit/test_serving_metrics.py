"""Metrics of one server over many swaps."""

from serving.metrics import NUM_KNOWN_RELEASES, Metrics
from serving.swap_schemas import SwapResult


def test_series_of_old_releases_are_dropped() -> None:
    metrics = Metrics("answers")
    for number in range(100):
        release = f"r{number:06d}-00000000"
        metrics.count_swap(SwapResult(result="live", release=release, phase="live"))
        metrics.new_tokens.labels(release).inc()
        metrics.first_token_seconds.labels(release).observe(1)
    text = metrics.render().decode()
    known = {number for number in range(100) if f"r{number:06d}" in text}
    assert known == set(range(100 - NUM_KNOWN_RELEASES, 100))
    assert 'serving_release_live{release="r000099-00000000"} 1.0' in text
    assert "r000098" not in "".join(line for line in text.splitlines() if "release_live" in line)
    assert 'serving_swaps_total{result="live"} 100.0' in text
