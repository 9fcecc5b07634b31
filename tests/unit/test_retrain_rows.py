"""Identity of rows, what is held out, and edits against deletions."""

from hypothesis import given
from hypothesis import strategies as st

from pipeline.retrain.rows import Row, data_digest, difference, split


def texts(*contents: str, file: str = "a.txt") -> list[Row]:
    return [Row(text=text, file=file, number=number) for number, text in enumerate(contents)]


def asked(*pairs: tuple[str, str]) -> list[Row]:
    return [
        Row(prompt=prompt, completion=completion, file="a.jsonl", number=number)
        for number, (prompt, completion) in enumerate(pairs)
    ]


def test_the_digest_ignores_order_and_files_but_not_repetition() -> None:
    assert data_digest(texts("a", "b")) == data_digest(texts("b", "a", file="other.txt"))
    assert data_digest(texts("a")) != data_digest(texts("a", "a"))
    assert data_digest(texts("ab")) != data_digest(asked(("a", "b")))


def test_a_new_answer_to_the_same_prompt_is_an_edit() -> None:
    change = difference(asked(("q", "old"), ("r", "x")), asked(("r", "x"), ("q", "new")))
    assert [row.completion for row in change.added] == ["new"]
    assert (change.num_edited, change.num_deleted) == (1, 0)


def test_a_prompt_that_is_gone_is_a_deletion_whatever_else_came() -> None:
    change = difference(asked(("q", "a"), ("r", "x")), asked(("other", "b"), ("r", "x")))
    assert (change.num_edited, change.num_deleted) == (0, 1)


def test_of_two_answers_one_kept_and_one_gone_is_a_deletion() -> None:
    change = difference(asked(("q", "a"), ("q", "b")), asked(("q", "a")))
    assert (len(change.added), change.num_edited, change.num_deleted) == (0, 0, 1)


def test_another_last_answer_in_a_conversation_is_an_edit() -> None:
    def talk(answer: str) -> list[Row]:
        return [
            Row(messages=(("user", "hi"), ("assistant", answer)), file="a.jsonl", number=0),
        ]

    assert difference(talk("a"), talk("b")).num_edited == 1


def test_text_replaced_in_place_is_edited_and_text_removed_is_deleted() -> None:
    old = texts("one", "two", "three", "four")
    assert difference(old, texts("one", "TWO", "three", "four")).num_edited == 1
    assert difference(old, texts("ONE", "two", "three", "four")).num_edited == 1
    assert difference(old, texts("one", "three", "four")).num_deleted == 1
    replaced_by_fewer = difference(old, texts("one", "TWO-THREE", "four"))
    assert (replaced_by_fewer.num_edited, replaced_by_fewer.num_deleted) == (1, 1)
    elsewhere = difference(old, texts("one", "three", "four", "five"))
    assert (elsewhere.num_edited, elsewhere.num_deleted) == (0, 1)
    other_file = difference(old, [*texts("one", "three", "four"), *texts("TWO", file="b.txt")])
    assert other_file.num_deleted == 1


def test_moving_rows_changes_nothing() -> None:
    change = difference(texts("a", "b", "c"), [*texts("c"), *texts("b", "a", file="b.txt")])
    assert change == difference([], [])


rows_strategy = st.lists(st.sampled_from("abcdefgh"), max_size=30).map(lambda found: texts(*found))


@given(old=rows_strategy, new=rows_strategy)
def test_a_difference_accounts_for_every_row(old: list[Row], new: list[Row]) -> None:
    change = difference(old, new)
    gone = change.num_edited + change.num_deleted
    assert len(old) - gone + len(change.added) == len(new)
    assert change.num_edited <= len(change.added)
    kept = [row.text for row in new]
    for row in change.added:
        kept.remove(row.text)
    assert sorted(kept) == sorted(set_aside(old, gone, kept))


def set_aside(old: list[Row], gone: int, kept: list[str | None]) -> list[str]:
    left = [str(row.text) for row in old]
    survivors = []
    for text in kept:
        left.remove(str(text))
        survivors.append(str(text))
    assert len(left) == gone
    return survivors


@given(count=st.integers(0, 300))
def test_rows_stay_held_out_as_the_dataset_grows(count: int) -> None:
    rows = texts(*(f"row {number}" for number in range(count)))
    more = texts(*(f"row {number}" for number in range(2 * count + 10)))
    training, held_out = split(rows, 0.08, 1)
    assert len(training) + len(held_out) == count
    by_hash = [row for row in held_out if int(row.digest[:8], 16) < 0.08 * 2**32]
    assert {row.text for row in by_hash} <= {row.text for row in split(more, 0.08, 1)[1]}


def test_small_datasets_hold_out_a_few_rows_and_tiny_ones_none() -> None:
    def num_held_out(count: int) -> int:
        return len(split(texts(*map(str, range(count))), 1e-9, 4)[1])

    assert [num_held_out(count) for count in (1, 3, 4, 8, 16, 100)] == [0, 0, 1, 2, 4, 4]


def test_copies_of_a_row_are_never_on_both_sides() -> None:
    training, held_out = split(texts(*["a", "b", "c", "d", "e"] * 9), 0.3, 2)
    assert held_out
    assert not {row.text for row in training} & {row.text for row in held_out}


def test_a_dataset_is_never_held_out_whole() -> None:
    assert all(split(texts(text), 0.49, 1)[0] for text in "abcdefghijkl")
