"""`metrics.jsonl`, as the progress bar reads it."""

from pathlib import Path

from pipeline.retrain.metrics import MetricsWriter, read_metrics


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


def test_what_a_measurement_found_right_is_told_beside_its_loss(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    told: list[tuple[dict[str, float], int]] = []
    writer = MetricsWriter(path)
    with writer.reporting_to((lambda values, step: told.append((values, step)),)):
        writer.write("train", "evaluation", step=4, loss=None, right=3, rows=5)
    ((metric,), _) = read_metrics(path)
    assert (metric.right, metric.rows, metric.loss) == (3, 5, None)
    assert told == [({"held_out/right": 3.0, "held_out/rows": 5.0}, 4)]


def test_lines_of_an_earlier_release_are_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"time": 1, "stage": "train", "event": "step", "step": 2, "of_old": 9}\n')
    ((metric,), _) = read_metrics(path)
    assert (metric.step, metric.right) == (2, None)


def test_a_restarted_job_goes_on_behind_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"time": 1, "stage": "train", "event": "start"}\n{"time": 2, "sta')
    MetricsWriter(path).write("train", "step", step=3)
    metrics, offset = read_metrics(path)
    assert [metric.event for metric in metrics] == ["start", "step"]
    assert offset == path.stat().st_size
