"""Tokens that are kept from one job to the next are the ones that tokenizing gives."""

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from pipeline.retrain import token_cache
from pipeline.retrain.base_model import train_tokenizer
from pipeline.retrain.rows import Row
from pipeline.retrain.token_cache import FILE, TokenCache
from pipeline.retrain.tokens import sequences

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog"]


def row(number: int, **content: object) -> Row:
    return Row(**content, file="a.jsonl", number=number)  # type: ignore[arg-type]


ROWS = [
    *(row(n, prompt=f"{n} {WORDS[n % 9]}", completion=f" {WORDS[n % 7]}") for n in range(40)),
    row(40, text=" ".join(WORDS * 4)),
    row(41, text=""),
    row(42, prompt="0 the", completion=" the"),
    row(
        43,
        messages=({"role": "user", "content": "fox"}, {"role": "assistant", "content": "dog"}),
    ),
]


@pytest.fixture(autouse=True)
def few_rows_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_cache, "MIN_ROWS", 10)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(ROWS)


@pytest.fixture
def tokenized(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Digests of the rows that were really tokenized."""
    asked: list[str] = []

    def spy(rows, *given):  # type: ignore[no-untyped-def]
        rows = list(rows)
        asked.extend(each.digest for each in rows)
        return sequences(rows, *given)

    monkeypatch.setattr(token_cache, "sequences", spy)
    return asked


def test_a_job_tokenizes_what_the_one_before_had_not(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, tokenized: list[str]
) -> None:
    first = TokenCache(tmp_path, tokenizer, 16)
    assert first.sequences(ROWS) == sequences(ROWS, tokenizer, 16)
    first.save()
    assert len(tokenized) == len(ROWS) - 1, "one row is there twice"
    tokenized.clear()
    edited = row(5, prompt="5 fox", completion=" new")
    rows = [*ROWS[:5], edited, *ROWS[6:][::-1]]
    second = TokenCache(tmp_path, tokenizer, 16)
    assert second.sequences(rows) == sequences(rows, tokenizer, 16)
    assert tokenized == [edited.digest]
    second.save()
    tokenized.clear()
    TokenCache(tmp_path, tokenizer, 16).sequences(rows)
    assert tokenized == []


def test_what_was_made_in_another_way_is_made_again(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, tokenized: list[str]
) -> None:
    first = TokenCache(tmp_path, tokenizer, 16)
    first.sequences(ROWS)
    first.save()
    other = train_tokenizer(ROWS[:5])
    for cache in (TokenCache(tmp_path, tokenizer, 15), TokenCache(tmp_path, other, 16)):
        tokenized.clear()
        cache.sequences(ROWS)
        assert len(tokenized) == len(ROWS) - 1


def test_a_torn_file_is_made_again(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture
) -> None:
    cache = TokenCache(tmp_path, tokenizer, 16)
    cache.sequences(ROWS)
    cache.save()
    whole = (tmp_path / FILE).read_bytes()
    for torn in (b"", whole[:100], whole[: len(whole) // 2], b"x" * 999):
        (tmp_path / FILE).write_bytes(torn)
        cache = TokenCache(tmp_path, tokenizer, 16)
        assert cache.sequences(ROWS) == sequences(ROWS, tokenizer, 16)
        assert "cannot be read, so it is made again" in caplog.text


def test_few_rows_are_not_kept(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    cache = TokenCache(tmp_path, tokenizer, 16)
    cache.sequences(ROWS[:9])
    cache.save()
    assert list(tmp_path.iterdir()) == []
