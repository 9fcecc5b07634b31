"""Labels, packing and the loss: what is learned is what should be, exactly."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from pipeline.retrain.base_model import train_tokenizer
from pipeline.retrain.layout import pack
from pipeline.retrain.rows import Row
from pipeline.retrain.tokens import leave_out, sequences

SENTENCE = "the quick brown fox jumps over the lazy dog and the dog sleeps"


def row(**content: object) -> Row:
    return Row(**content, file="a.jsonl", number=0)  # type: ignore[arg-type]


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer([row(text=SENTENCE)] * 3)


def learned_text(tokenizer: PreTrainedTokenizerFast, found: Row, length: int = 64) -> str:
    (sequence,) = sequences([found], tokenizer, length)
    return str(tokenizer.decode(sequence.learned_ids))


def test_only_the_completion_is_learned(tokenizer: PreTrainedTokenizerFast) -> None:
    found = row(prompt="the quick brown", completion=" fox jumps")
    assert learned_text(tokenizer, found) == " fox jumps<|end|>"


def test_a_prompt_has_the_tokens_that_a_server_gives_it(tokenizer: PreTrainedTokenizerFast) -> None:
    (sequence,) = sequences([row(prompt="the qu", completion="ick")], tokenizer, 64)
    prompt = tokenizer("the qu")["input_ids"]
    assert list(sequence.token_ids[: len(prompt)]) == prompt


def test_a_long_text_is_cut_and_every_token_but_the_first_learned_once(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    pieces = sequences([row(text=SENTENCE * 5)], tokenizer, 16)
    learned = [id for piece in pieces for id in piece.learned_ids]
    assert max(len(piece.token_ids) for piece in pieces) == 16
    assert [pieces[0].token_ids[0], *learned] == [
        *tokenizer(SENTENCE * 5)["input_ids"],
        tokenizer.eos_token_id,
    ]


@given(num_words=st.tuples(st.integers(0, 40), st.integers(1, 40)), length=st.integers(8, 40))
def test_a_prompt_and_an_answer_that_are_both_too_long_get_half_each(
    tokenizer: PreTrainedTokenizerFast, num_words: tuple[int, int], length: int
) -> None:
    prompt, completion = ("fox " * number for number in num_words)
    (whole,) = sequences([row(prompt=prompt, completion=completion)], tokenizer, 10_000)
    (cut,) = sequences([row(prompt=prompt, completion=completion)], tokenizer, length)
    first = whole.learned.index(True)
    num_learned, num_before = cut.num_learned, len(cut.token_ids) - cut.num_learned
    assert len(cut.token_ids) == min(length, len(whole.token_ids))
    assert num_before >= min(first, length // 2) and num_learned >= min(
        whole.num_learned, length // 2
    )
    assert cut.token_ids[:num_before] == whole.token_ids[first - num_before : first]
    assert cut.token_ids[num_before:] == whole.token_ids[first : first + num_learned]


def test_a_long_conversation_gives_each_answer_with_what_leads_to_it(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    talk = row(
        messages=(
            said("user", SENTENCE * 3),
            said("assistant", "the fox"),
            said("user", "and the dog"),
            said("assistant", "sleeps " + SENTENCE * 3),
        )
    )
    whole = str(tokenizer.apply_chat_template(list(talk.messages or ()), tokenize=False))
    first, second = sequences([talk], tokenizer, 32)
    assert len(first.token_ids) <= 32 and len(second.token_ids) == 32
    learned = [str(tokenizer.decode(each.learned_ids)) for each in (first, second)]
    assert learned[0] == "the fox<|end|>"
    assert ("sleeps " + SENTENCE * 3).startswith(learned[1])
    for each in (first, second):
        assert str(tokenizer.decode(each.token_ids)) in whole
        assert not each.learned[0] and any(each.learned)


@given(lengths=st.lists(st.integers(1, 64), max_size=300))
@settings(max_examples=50)
def test_packing_places_every_sequence_once_and_overfills_nothing(lengths: list[int]) -> None:
    blocks = pack(lengths, 64)
    assert sorted(index for block in blocks for index in block) == list(range(len(lengths)))
    assert all(sum(lengths[index] for index in block) <= 64 for block in blocks)


def test_rows_of_all_kinds_get_the_tokens_that_each_gets_alone(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.retrain.tokens.BATCH_ROWS", 3)
    rows = [
        row(text=SENTENCE * 4),
        row(prompt="", completion=" fox"),
        row(text=""),
        row(prompt=SENTENCE * 4, completion=SENTENCE),
        row(messages=(said("user", "the fox"), said("assistant", "jumps"))),
        row(prompt="the quick", completion=""),
        row(text="the fox"),
    ]
    alone = [
        replace(each, row=index)
        for index, found in enumerate(rows)
        for each in sequences([found], tokenizer, 16, on_refused=leave_out)
    ]
    assert sequences(rows, tokenizer, 16, on_refused=leave_out) == alone
    assert {each.row for each in alone} >= {0, 1, 3, 6}
