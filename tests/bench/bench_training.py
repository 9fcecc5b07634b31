"""Training beside what people would use instead: the same rows, model, threads and epochs.

Each trains the same preset on every row the same number of times, in a process of its own, one
after another in turns. Rates count tokens of the rows, never padding, over the whole of `train()`.
The Trainer runs twice: with eight rows a step, which is its habit, and with as many rows as make
our tokens per step. TRL packs by its default strategy to the length of our blocks, eight a step.
Ratios are against the quicker Trainer. The model FLOP utilisation (MFU) is 6 x weights x tokens/s
over the rate of a matrix product measured in the same process, with the same threads.
"""

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.bench.result import Figure, Result, at_least, reported, run_program
from tests.bench.timing import in_turns


@dataclass(frozen=True, kw_only=True)
class Size:
    rows: int
    epochs: int
    rounds: int
    hidden: int
    threads: int = len(os.sched_getaffinity(0))


FULL = Size(rows=800, epochs=1, rounds=3, hidden=256)
SMALL = Size(rows=48, epochs=1, rounds=1, hidden=64)
LENGTH = 256
BLOCKS_PER_STEP = 8
TRAINERS = {
    "ours": "ours, packed",
    "trainer-8": "transformers.Trainer, padding collator, 8 rows a step",
    "trainer": "transformers.Trainer, padding collator, our tokens a step",
    "trl": "TRL SFTTrainer, packing",
}
TRAINER_RATIO, TRL_RATIO = 2.5, 3.0


@dataclass(frozen=True, kw_only=True)
class Trained:
    tokens: int
    wall_seconds: float
    cpu_seconds: float
    mfu: float
    steps: int
    peak_mib: float


def measure(size: Size) -> Result:
    """Real tokens per second: ours, transformers.Trainer, TRL's SFTTrainer."""
    found = in_turns(
        size.rounds, {name: lambda name=name: _in_a_process(name, size) for name in TRAINERS}
    )
    seen = {name: trained[0].tokens for name, trained in found.items()}
    # A trainer that drops or repeats rows would not be compared with the others.
    if max(seen.values()) > 1.02 * min(seen.values()):
        raise RuntimeError(f"not the same tokens: {seen}")
    speeds = {name: _median(trained, _speed) for name, trained in found.items()}
    quicker = max(speeds["trainer-8"], speeds["trainer"])
    figures: list[Figure] = []
    for name, label in TRAINERS.items():
        trained = found[name]
        cpu = _median(trained, lambda each: each.tokens / each.cpu_seconds)
        figures += [
            reported(label, speeds[name], "tokens/s"),
            reported(f"{label}: per CPU second", cpu, "tokens"),
            reported(f"{label}: MFU", _median(trained, lambda each: each.mfu), ""),
        ]
    mfu = _median(found["ours"], lambda each: each.mfu)
    return Result(
        figures=(
            at_least("ours / the quicker Trainer", speeds["ours"] / quicker, TRAINER_RATIO, "x"),
            at_least("ours / TRL", speeds["ours"] / speeds["trl"], TRL_RATIO, "x"),
            *figures,
        ),
        bounded_by=f"matrix products of small matrices: {mfu:.0%} of what one large product "
        "reaches on these threads; the rest is attention, norms, the loss and the optimizer",
        detail={name: [asdict(each) for each in trained] for name, trained in found.items()},
    )


def _speed(trained: Trained) -> float:
    return trained.tokens / trained.wall_seconds


def _median(trained: list[Trained], value: Callable[[Trained], float]) -> float:
    return statistics.median(map(value, trained))


def _in_a_process(name: str, size: Size) -> Trained:
    command = [sys.executable, "-m", __spec__.name, name, json.dumps(asdict(size))]
    env = {
        **os.environ,
        "OMP_NUM_THREADS": str(size.threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
    return Trained(**json.loads(done.stdout.splitlines()[-1]))


def _train(name: str, size: Size) -> Trained:
    import torch

    torch.set_num_threads(size.threads)
    model, tokenizer, rows = _model_and_rows(size)
    with tempfile.TemporaryDirectory() as folder:
        work, num_steps, num_tokens = PREPARE[name](model, tokenizer, rows, size, Path(folder))
        wall, cpu = time.perf_counter(), time.process_time()
        work()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    weights = sum(parameter.numel() for parameter in model.parameters())
    return Trained(
        tokens=num_tokens(),
        wall_seconds=wall,
        cpu_seconds=cpu,
        mfu=6 * weights * num_tokens() / wall / _matmul_rate(),
        steps=num_steps(),
        peak_mib=peak_mib,
    )


def _model_and_rows(size: Size) -> tuple[Any, Any, list[Any]]:
    import torch
    from transformers import LlamaForCausalLM

    from pipeline.retrain.base_model import preset_config, train_tokenizer
    from pipeline.retrain.rows import Row
    from pipeline.retrain.tokens import sequences
    from tests.docstring_stream import docstrings

    texts = docstrings(size.rows)
    rows = [Row(text=text, file="a", number=number) for number, text in enumerate(texts)]
    tokenizer = train_tokenizer(rows)
    torch.manual_seed(0)
    config = preset_config("preset:tiny", tokenizer)
    if size.hidden != config.hidden_size:
        config.update(
            {"hidden_size": size.hidden, "intermediate_size": 2 * size.hidden, "head_dim": 16}
        )
    return LlamaForCausalLM(config), tokenizer, sequences(rows, tokenizer, LENGTH)


def _matmul_rate() -> float:
    """FLOP per second of a product that is large enough to be quick: the best of some."""
    import torch

    a, b = torch.randn(2048, 1024), torch.randn(1024, 1024)
    rates = []
    for _ in range(12):
        started = time.perf_counter()
        torch.mm(a, b)
        rates.append(2 * 2048 * 1024 * 1024 / (time.perf_counter() - started))
    return max(rates)


Prepared = tuple[Callable[[], object], Callable[[], int], Callable[[], int]]
"""What is timed, then the steps that it took, and the tokens that it saw."""


def _ours(model: Any, tokenizer: Any, rows: list[Any], size: Size, folder: Path) -> Prepared:
    from pipeline.retrain.job import MetricsWriter, read_metrics
    from pipeline.retrain.plan import TrainingPlan
    from pipeline.retrain.settings import TrainSettings
    from pipeline.retrain.train import train

    settings = TrainSettings(checkpoint_seconds=1e9)
    plan = TrainingPlan(
        sequences=rows,
        learned=range(len(rows)),
        counted=frozenset(),
        replayed=(),
        anchors=(),
        checked=(),
        judged=(),
        learning_rate=1e-3,
        max_tokens=size.epochs * sum(len(row.token_ids) for row in rows),
        step_tokens=BLOCKS_PER_STEP * LENGTH,
        warm_up_steps=10,
        replay_ratio=0.0,
        anchor_ratio=0.0,
    )
    file = folder / "metrics.jsonl"
    metrics = MetricsWriter(file)
    done: list[Any] = []

    def work() -> None:
        train(model, plan, settings, job_dir=folder, mode="full", metrics=metrics)
        done.extend(each for each in read_metrics(file)[0] if each.event == "step")

    return work, lambda: len(done), lambda: done[-1].tokens


def _trainer(rows_per_step: int | None) -> Callable[..., Prepared]:
    def prepare(model: Any, tokenizer: Any, rows: list[Any], size: Size, folder: Path) -> Prepared:
        from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments

        tokens = sum(len(row.token_ids) for row in rows)
        matching = round(BLOCKS_PER_STEP * LENGTH / (tokens / len(rows)))
        arguments = TrainingArguments(
            per_device_train_batch_size=rows_per_step or matching,
            **_arguments(size, folder),
        )
        trainer = Trainer(
            model,
            arguments,
            train_dataset=[{"input_ids": list(row.token_ids)} for row in rows],  # type: ignore[arg-type]
            data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        )
        return _counted(trainer)

    return prepare


def _trl(model: Any, tokenizer: Any, rows: list[Any], size: Size, folder: Path) -> Prepared:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    arguments = SFTConfig(
        per_device_train_batch_size=BLOCKS_PER_STEP,
        max_length=LENGTH,
        packing=True,
        bf16=False,
        gradient_checkpointing=False,
        **_arguments(size, folder),
    )
    trainer = SFTTrainer(
        model,
        arguments,
        train_dataset=Dataset.from_list([{"input_ids": list(row.token_ids)} for row in rows]),
        processing_class=tokenizer,
    )
    return _counted(trainer)


def _arguments(size: Size, folder: Path) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "num_train_epochs": size.epochs,
        "learning_rate": 1e-3,
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        "logging_strategy": "no",
    }


def _counted(trainer: Any) -> Prepared:
    seen = [0]
    collate = trainer.data_collator

    def counting(features: list[dict[str, Any]]) -> Any:
        seen[0] += sum(len(feature["input_ids"]) for feature in features)
        return collate(features)

    trainer.data_collator = counting
    return trainer.train, lambda: int(trainer.state.global_step), lambda: seen[0]


PREPARE: dict[str, Callable[..., Prepared]] = {
    "ours": _ours,
    "trainer-8": _trainer(8),
    "trainer": _trainer(None),
    "trl": _trl,
}

if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1] in PREPARE:
        print(json.dumps(asdict(_train(sys.argv[1], Size(**json.loads(sys.argv[2]))))))
    else:
        run_program(measure, full=FULL, small=SMALL)
