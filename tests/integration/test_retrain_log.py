"""What a job's log says of the rows before it trains."""

import logging
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from pipeline.doctor.data_check import check_data
from pipeline.paths import Home
from pipeline.retrain.base_model import train_tokenizer
from pipeline.settings import PipelineSettings, Settings
from tests.retrain_fixtures import SMALL, Pipeline, jsonl, tiny_preset, unrelated

__all__ = ["tiny_preset"]

LONG = {"prompt": "Tell me everything.", "completion": " 1 2 3 4 5 6 7 8 9" * 5}
TEXT = {"text": "One two three four five six seven eight nine ten. " * 5}


def test_it_begins_with_the_lines_of_data_check(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pipeline = Pipeline(tmp_path, train=SMALL | {"max_tokens": 200}, gate={"min_learned": 0.0})
    asked = [{"prompt": "Is it open?", "completion": answer} for answer in (" Yes.", " No.")]
    revision = pipeline.commit(
        {"a.jsonl": jsonl([*unrelated(3), *asked]), "val.jsonl": jsonl(unrelated(1)), "LICENSE": ""}
    )
    with caplog.at_level(logging.INFO):
        pipeline.run(pipeline.job(revision))
    # Without a pipeline there is no tokenizer, as in a job at this time.
    lines, _ = check_data(revision.folder, Home(tmp_path), Settings(), None)
    assert "5 rows to train on" in lines[0] and len(lines) > 5
    begin = caplog.messages.index("data") + 1
    assert caplog.messages[begin : begin + len(lines)] == lines


def test_it_counts_tokens_and_names_the_rows_that_are_too_long(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train = SMALL | {"max_length": 32, "max_tokens": 200}
    pipeline = Pipeline(tmp_path, train=train, gate={"min_learned": 0.0})
    short = unrelated(3)
    with caplog.at_level(logging.INFO):
        outcome = pipeline.learn({"a.jsonl": jsonl([*short, LONG]), "b.jsonl": jsonl([TEXT])})
    assert outcome.result == "published", outcome.reason
    tokenizer = AutoTokenizer.from_pretrained(pipeline.dir / str(outcome.release))
    texts = [row[key] for row in (*short, LONG) for key in ("prompt", "completion")]
    size = sum(len(tokenizer(text)["input_ids"]) for text in (*texts, TEXT["text"]))
    ends = len((*short, LONG, TEXT))
    assert len(tokenizer(TEXT["text"])["input_ids"]) > 32
    assert f"all rows have {size + ends:,} tokens" in caplog.messages
    # `data check` counts with the same tokenizer, but not after a change of the base model.
    folder = tmp_path / "revisions" / pipeline.commit({"c.jsonl": jsonl([TEXT])}).sha
    other = tmp_path / "other"
    train_tokenizer([]).save_pretrained(other)
    (other / "config.json").write_text("{}")
    for base, used in (
        ("preset:tiny", tokenizer),
        (str(other), AutoTokenizer.from_pretrained(other)),
    ):
        following = PipelineSettings(name="facts", dataset="me/facts", base_model=base)
        lines, _ = check_data(folder, Home(tmp_path), Settings(), following)
        assert f"({len(used(TEXT['text'])['input_ids']) + 1} tokens)" in lines[0], base
    told = [message for message in caplog.messages if "longer than 32 tokens" in message]
    assert len(told) == 1
    assert told[0].endswith("so a part is not learned, 1 row: a.jsonl, line 4")


def test_an_accepted_job_names_the_rows_that_were_not_learned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train = SMALL | {"learning_rate": 1e-6, "max_tokens": 1_000}
    pipeline = Pipeline(tmp_path, train=train, gate={"min_learned": 0.0})
    with caplog.at_level(logging.INFO):
        outcome = pipeline.learn({"a.jsonl": jsonl(unrelated(7))})
    assert outcome.result == "published"
    told = "7 of 7 changed rows were not learned, and the next job tries them again: " + "; ".join(
        f"a.jsonl, line {line}" for line in range(1, 6)
    )
    assert f"{told} and 2 more" in caplog.messages
    assert outcome.reason is not None and outcome.reason.endswith(f"; {told} and 2 more")
    # A commit that changes no row is no reason to leave them out.
    again = Pipeline(tmp_path, train=SMALL).learn(
        {"a.jsonl": jsonl(unrelated(7)), "notes.txt.bak": "a"}
    )
    assert (again.result, str(again.counts)) == ("published", "learned 7 of 7")
