"""Training: real tokens per second and peak memory, ours beside what people would use instead.

    python -m tests.bench.bench_training [--rows 600] [--tokens 30000] [--only ours|trainer|trl]

Each trains the same preset on the same docstrings, in a process of its own, one after another, with
the same number of threads and tokens per step. Rates count tokens of the rows, not padding, after
the first two steps. The model FLOP utilisation (MFU) is 6 x weights x tokens/s over the rate of
a matrix product measured in the same process. A library that is not installed is left out, and the
table says so.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

STEP_SEQUENCES = 8
LENGTH = 256
NEEDS = {"ours": "torch", "trainer": "accelerate", "trl": "trl"}
NAMES = {
    "ours": "ours, packed",
    "trainer": "transformers.Trainer, padding collator",
    "trl": "TRL SFTTrainer, packing",
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=600)
    parser.add_argument("--tokens", type=int, default=30_000)
    parser.add_argument("--only", choices=NEEDS)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--measure", choices=NEEDS, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.measure:
        print(json.dumps(MEASURE[asked.measure](asked.rows, asked.tokens)))
        return
    figures: dict[str, Any] = {}
    for name, module in NEEDS.items():
        if asked.only not in (None, name):
            continue
        if find_spec(module) is None:
            figures[name] = {"missing": module}
            continue
        command = [sys.executable, "-m", "tests.bench.bench_training", "--measure", name]
        command += ["--rows", str(asked.rows), "--tokens", str(asked.tokens)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        figures[name] = json.loads(done.stdout.splitlines()[-1])
    print(_table(figures))
    if asked.json:
        asked.json.write_text(json.dumps(figures, indent=2))


def _table(figures: dict[str, Any]) -> str:
    lines = ["| | tokens/s | per CPU second | ours is | MFU | peak memory, MiB |", "|--" * 6 + "|"]
    ours = figures.get("ours", {}).get("tokens_per_cpu_second")
    for name, found in figures.items():
        if "missing" in found:
            lines.append(f"| {NAMES[name]} | {found['missing']} is not installed | | | | |")
            continue
        rate, per_cpu = found["tokens_per_second"], found["tokens_per_cpu_second"]
        ratio = f"{ours / per_cpu:.2f} x" if ours else ""
        lines.append(
            f"| {NAMES[name]} | {rate:,.0f} | {per_cpu:,.0f} | {ratio} | {found['mfu']:.2f} "
            f"| {found['peak_mib']:,.0f} |"
        )
    return "\n".join(lines)


def _model_and_rows(num_rows: int) -> tuple[Any, Any, list[Any]]:
    import torch
    from transformers import LlamaForCausalLM

    from pipeline.retrain.base_model import preset_config, train_tokenizer
    from pipeline.retrain.rows import Row
    from pipeline.retrain.tokens import sequences
    from tests.docstring_stream import docstrings

    rows = [Row(text=t, file="a", number=n) for n, t in enumerate(docstrings(num_rows))]
    tokenizer = train_tokenizer(rows)
    torch.manual_seed(0)
    model = LlamaForCausalLM(preset_config("preset:tiny", tokenizer))
    return model, tokenizer, sequences(rows, tokenizer, LENGTH)


def _figures(model: Any, tokens: int, seconds: float, cpu_seconds: float) -> dict[str, float]:
    import torch

    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    a, b = torch.randn(2048, 1024), torch.randn(1024, 1024)
    product = 2 * 2048 * 1024 * 1024
    rates = []
    for _ in range(12):
        started = time.process_time()
        torch.mm(a, b)
        rates.append(product / (time.process_time() - started))
    weights = sum(parameter.numel() for parameter in model.parameters())
    return {
        "tokens": tokens,
        "tokens_per_second": tokens / seconds,
        "tokens_per_cpu_second": tokens / cpu_seconds,
        "mfu": 6 * weights * tokens / cpu_seconds / max(rates),
        "peak_mib": peak_mib,
    }


def _ours(num_rows: int, num_tokens: int) -> dict[str, float]:
    from pipeline.retrain.metrics import MetricsWriter
    from pipeline.retrain.settings import TrainSettings
    from pipeline.retrain.train import Lessons, train

    model, _, rows = _model_and_rows(num_rows)
    clock: list[tuple[float, float, int]] = []

    class Watch(MetricsWriter):
        def write(self, stage: Any, event: Any, **values: Any) -> None:
            if event == "step":
                clock.append((time.perf_counter(), time.process_time(), values["tokens"]))

    settings = TrainSettings(
        tokens_per_step=STEP_SEQUENCES * LENGTH, evaluations=1, checkpoint_seconds=1e9
    )
    lessons = Lessons(
        training=rows,
        held_out=[rows[:1]],
        learning_rate=1e-3,
        max_tokens=num_tokens,
        max_epochs=99.0,
    )
    with tempfile.TemporaryDirectory() as folder:
        watch = Watch(Path(folder) / "metrics.jsonl")
        train(model, lessons, settings, job_dir=Path(folder), job_id="bench", metrics=watch)
    return _between(model, clock)


def _between(model: Any, clock: list[tuple[float, float, int]]) -> dict[str, float]:
    (wall, cpu, tokens), (last_wall, last_cpu, last_tokens) = clock[1], clock[-1]
    return _figures(model, last_tokens - tokens, last_wall - wall, last_cpu - cpu)


def _callback(clock: list[tuple[float, float, int]], seen: list[int]) -> Any:
    from transformers import TrainerCallback

    class Watch(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.append((time.perf_counter(), time.process_time(), seen[0]))

    return Watch()


def _trainer(num_rows: int, num_tokens: int) -> dict[str, float]:
    from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments

    model, tokenizer, rows = _model_and_rows(num_rows)
    collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    seen, clock = [0], []

    def counting(features: list[dict[str, Any]]) -> Any:
        part = collate(features)
        seen[0] += sum(len(feature["input_ids"]) for feature in features)
        return part

    mean = sum(len(row.token_ids) for row in rows) / len(rows)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=STEP_SEQUENCES,
            max_steps=max(4, round(num_tokens / mean / STEP_SEQUENCES)),
            learning_rate=1e-3,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
            logging_strategy="no",
        )
        data = [{"input_ids": list(row.token_ids)} for row in rows]
        Trainer(
            model,
            arguments,
            train_dataset=data,  # type: ignore[arg-type]
            data_collator=counting,
            callbacks=[_callback(clock, seen)],
        ).train()
    return _between(model, clock)


def _trl(num_rows: int, num_tokens: int) -> dict[str, float]:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    model, tokenizer, rows = _model_and_rows(num_rows)
    seen, clock = [0], []
    data = Dataset.from_list([{"input_ids": list(row.token_ids)} for row in rows])
    with tempfile.TemporaryDirectory() as folder:
        arguments = SFTConfig(
            output_dir=folder,
            per_device_train_batch_size=STEP_SEQUENCES,
            max_length=LENGTH,
            packing=True,
            max_steps=max(4, round(num_tokens / LENGTH / STEP_SEQUENCES)),
            learning_rate=1e-3,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            disable_tqdm=True,
            logging_strategy="no",
        )
        trainer = SFTTrainer(
            model,
            arguments,
            train_dataset=data,
            processing_class=tokenizer,
            callbacks=[_callback(clock, seen)],
        )
        collate = trainer.data_collator

        def counting(features: list[dict[str, Any]]) -> Any:
            seen[0] += sum(len(feature["input_ids"]) for feature in features)
            return collate(features)

        trainer.data_collator = counting
        trainer.train()
    return _between(model, clock)


MEASURE = {"ours": _ours, "trainer": _trainer, "trl": _trl}

if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
