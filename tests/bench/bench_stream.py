"""Ten revisions of real text: deltas against full retrainings, a table and JSON.

    python -m tests.bench.bench_stream [--rows 1500] [--hidden 256] [--max-tokens 250000]

Small sizes tell the same story in less time: the losses are counted, not the seconds.
"""

import argparse
import tempfile
from pathlib import Path

import torch

from pipeline.retrain import base_model
from tests.docstring_stream import stream
from tests.learning_stream import Learned, as_json, follow, table


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=1_500, help="in the first revision")
    parser.add_argument("--hidden", type=int, default=256, help="of the preset; less is quicker")
    parser.add_argument("--max-tokens", type=int, default=250_000, help="of a full training")
    parser.add_argument("--revisions", type=int, default=10)
    parser.add_argument("--learning-rate", type=float, default=None)
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    preset = base_model.PRESETS["preset:tiny"]
    base_model.PRESETS["preset:tiny"] = preset | {
        "hidden_size": asked.hidden,
        "intermediate_size": asked.hidden * 11 // 4,
    }
    train = {"max_tokens": asked.max_tokens, "learning_rate": asked.learning_rate}
    commits = stream(asked.rows)[: asked.revisions]
    rows: list[Learned] = []
    with tempfile.TemporaryDirectory() as home:
        everyone = range(1, len(commits))
        for row in follow(Path(home), commits, compared=everyone, train=train):
            rows.append(row)
            print(table(rows).splitlines()[-1], flush=True)
    print("\n" + table(rows))
    if asked.json:
        asked.json.write_text(as_json(rows))


if __name__ == "__main__":
    main()
