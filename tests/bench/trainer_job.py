"""What a person would write in place of a retraining job, for `bench_memory` to weigh.

Base model folder, rows as JSON lines, output folder, epochs: a `transformers.Trainer` trains,
evaluates and saves.
"""

import sys

from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)

LENGTH = 256
ROWS_PER_STEP = 8


def main(base: str, rows: str, out: str, epochs: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base)
    data = load_dataset("json", data_files=rows, cache_dir=f"{out}/cache", split="train")
    data = data.map(
        lambda part: tokenizer(part["text"], truncation=True, max_length=LENGTH),
        batched=True,
        remove_columns=data.column_names,
    ).train_test_split(test_size=0.08, seed=0)
    arguments = TrainingArguments(
        output_dir=out,
        num_train_epochs=float(epochs),
        per_device_train_batch_size=ROWS_PER_STEP,
        learning_rate=1e-3,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
    )
    trainer = Trainer(
        model,
        arguments,
        train_dataset=data["train"],
        eval_dataset=data["test"],
        processing_class=tokenizer,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )
    trainer.train()
    print(trainer.evaluate())
    trainer.save_model(out)


if __name__ == "__main__":
    main(*sys.argv[1:])
