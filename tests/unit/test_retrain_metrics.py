"""`metrics.jsonl`, as those read it who show progress."""

from pathlib import Path

from pipeline.retrain.job import MetricsWriter, read_metrics


def test_lines_are_read_once_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert read_metrics(path) == ((), 0)
    writer = MetricsWriter(path)
    writer.write("train", "start")
    writer.write("train", "step", step=1, steps=9, loss=2.5, tokens=100)
    first, offset = read_metrics(path)
    assert [metric.event for metric in first] == ["start", "step"]
    assert (first[1].step, first[1].loss, first[1].seconds) == (1, 2.5, None)
    with path.open("a") as file:
        file.write('{"time": 1, "stage": "train", "eve')
    assert read_metrics(path, offset) == ((), offset)


def test_a_restarted_job_goes_on_behind_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"time": 1, "stage": "train", "event": "start"}\n{"time": 2, "sta')
    MetricsWriter(path).write("train", "step", step=3)
    metrics, offset = read_metrics(path)
    assert [metric.event for metric in metrics] == ["start", "step"]
    assert offset == path.stat().st_size
