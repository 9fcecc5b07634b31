"""How much a gate measures: samples of rows of bounded sizes, and answers of the base model."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from jobs.counts import Counts
from pipeline.retrain.anchors import Anchor, agreement, base_answers
from pipeline.retrain.asking import Asked
from pipeline.retrain.checkpoint import Checkpoint
from pipeline.retrain.errors import BaseModelError
from pipeline.retrain.evaluate import GROUPS, Evaluation, MeasuredRows, Measurement, compare
from pipeline.retrain.learning import choose_rows, measure
from pipeline.retrain.loss import RowLoss
from pipeline.retrain.model import LoadedModel
from pipeline.retrain.rows import Row
from pipeline.retrain.settings import GateSettings
from tests.training_fixtures import one_thread
from tests.unit.test_retrain_architectures import network
from tests.unit.test_retrain_plan import data, facts, texts

__all__ = ["one_thread"]


class Words:
    """A tokenizer: a token for each word."""

    chat_template = None
    eos_token_id = 1

    def __call__(self, text: str | list[str], **_: Any) -> dict[str, list[Any]]:
        if isinstance(text, list):
            return {"input_ids": [self(each)["input_ids"] for each in text]}
        return {"input_ids": [2 + len(word) % 5 for word in text.split()]}

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The end is the only special token."""
        shown = [each for each in token_ids if not (skip_special_tokens and each == 1)]
        return " ".join(map(str, shown))


TOKENIZER = cast(Any, Words())


def chosen(max_tokens: int) -> MeasuredRows:
    told = data(
        changed=facts(40),
        known=facts(40, 50),
        deleted=facts(40, 100),
        held_out=texts(40),
    )
    gate = GateSettings(max_tokens=max_tokens)
    return choose_rows(told, facts(40, 200), TOKENIZER, 64, gate)


def test_of_each_group_no_more_tokens_are_measured_than_the_gate_allows() -> None:
    found = chosen(60)  # a fact has six words, a text has five
    assert [len(found.groups[group]) for group in GROUPS] == [10, 10, 10, 12, 40]
    assert found.groups["golden"] == facts(40, 200), "golden questions are all measured"
    assert found == chosen(60), "the counts of two jobs are of the same rows"
    numbers = [row.number for row in found.groups["changed"]]
    assert numbers == sorted(numbers) and numbers != list(range(10)), "a sample of the whole"


def measured_as(**groups: Sequence[RowLoss]) -> Measurement:
    return Measurement(losses=dict.fromkeys(GROUPS, ()) | groups, base_agreement=None)


def right(count: int) -> Sequence[RowLoss]:
    return [RowLoss(row=place, nats=0.5, num_tokens=1, num_right=1) for place in range(count)]


def evaluation(
    found: MeasuredRows,
    served: Measurement,
    new: Measurement,
    *,
    waiting: Sequence[Row] = (),
    is_whole: bool = False,
    **told: Any,
) -> Evaluation:
    """waiting: rows that no step has visited, or if `is_whole`, that were wrong in their visit."""
    places = tuple(range(len(waiting)))
    state = {"not_learned" if is_whole else "not_trained": places}
    done = Checkpoint.model_validate({"mode": "full", "step": 1, "tokens": 1, "name": ""} | state)
    of = data(mode="delta", changed=tuple(waiting), **told)
    return compare(found, served, new, GateSettings(), of, done, against="r")


def test_a_long_row_does_not_end_the_sample() -> None:
    """An answer is measured only as far as it is trained on. A long text is left out."""
    words = "word " * 1_000
    answers = [Row(prompt=f"{words}{n}", completion="a", file="l", number=n) for n in range(40)]
    gate = GateSettings(max_tokens=320)
    found = choose_rows(data(changed=tuple(answers)), (), TOKENIZER, 8, gate)
    assert len(found.groups["changed"]) == 40
    found = choose_rows(data(changed=tuple(answers)), (), TOKENIZER, 16, gate)
    assert len(found.groups["changed"]) == 20
    mixed = [Row(text="word " * 200, file="l", number=n) for n in range(20)]
    found = choose_rows(data(changed=(*mixed, *texts(40))), (), TOKENIZER, 64, gate)
    assert set(found.groups["changed"]) == set(texts(40))
    found = choose_rows(data(changed=tuple(mixed)), (), TOKENIZER, 64, gate)
    assert len(found.groups["changed"]) == 1, "but something is always measured"


def test_the_counts_say_of_how_many_changed_rows_a_sample_was_measured() -> None:
    told = data(changed=(*facts(40), *texts(40, 40)))
    found = choose_rows(told, (), TOKENIZER, 64, GateSettings(max_tokens=60))
    measured = [row for row in found.groups["changed"] if row.has_answer]
    assert {*measured, *found.unmeasured} == set(facts(40))

    def counts(not_trained: Sequence[Row]) -> Counts:
        everything = measured_as(changed=right(len(found.groups["changed"])))
        return evaluation(found, everything, everything, waiting=not_trained).counts

    assert (counts(()).changed, counts(()).all_changed) == (len(measured), 40)
    waiting = counts((measured[0], *found.unmeasured[:5]))
    assert (waiting.changed, waiting.all_changed) == (len(measured) - 1, 34)
    assert waiting.not_trained == 6
    assert choose_rows(told, (), TOKENIZER, 64, GateSettings()).unmeasured == ()


def talk(number: int) -> Row:
    asked = {"role": "user", "content": f"q {number}"}
    said = (asked, {"role": "assistant", "content": "a"})
    return Row(messages=said, file="chat", number=number)


def test_weights_whose_chat_template_refuses_a_row_do_not_say_it() -> None:
    """After a change of the base model, the served weights and the new ones have different
    templates."""
    greeting = {"role": "assistant", "content": "hello"}
    one, two, three = (
        replace(talk(number), messages=(greeting, *(talk(number).messages or ())))
        for number in (1, 2, 3)
    )
    told = data(changed=(one,), known=(two,), deleted=(three,))
    rows = choose_rows(told, (), TOKENIZER, 64, GateSettings())

    def measured(**options: bool) -> Measurement:
        return measure(base_of(Path())(), rows, tell=lambda done, of: None, **options)

    with pytest.raises(BaseModelError, match="no chat template"):
        measured()
    assert not any(measured(skip_refused=True).losses.values())
    rows = choose_rows(data(deleted=(three,)), (), TOKENIZER, 64, GateSettings())
    assert measured().losses["deleted"] == [], "nobody can correct a deleted row"


def test_a_row_that_only_the_new_weights_can_be_asked_for_was_not_said_before() -> None:
    told = data(changed=(talk(1),), known=(talk(2),), deleted=(talk(3),))
    rows = choose_rows(told, (), TOKENIZER, 64, GateSettings())
    can = measured_as(changed=right(1), known=right(1), deleted=right(1))
    cannot = measured_as()
    counts = evaluation(rows, cannot, can).counts
    assert (counts.changed, counts.learned, counts.learned_before) == (1, 1, 0)
    assert (counts.known, counts.deleted) == (0, 0)
    counts = evaluation(rows, can, measured_as(changed=right(1), known=right(1))).counts
    assert (counts.deleted, counts.unlearned) == (1, 1)


def test_a_refusal_after_less_than_one_pass_names_the_budget() -> None:
    """A full training forgets what it does not reach, and more tokens would mend this."""
    rows = choose_rows(data(known=facts(30)), (), TOKENIZER, 64, GateSettings())
    served = measured_as(known=right(30))
    new = measured_as(known=[replace(each, num_right=0) for each in right(30)])
    kept, budget = evaluation(rows, served, new, waiting=facts(25)).refusals
    assert kept.startswith("0 of 30 rows known before are answered right")
    assert "25 rows are not yet trained; raise `train.max_tokens`" in budget
    assert len(evaluation(rows, served, new).refusals) == 1
    assert evaluation(rows, served, served, waiting=facts(25)).refusals == ()


def test_a_row_that_is_not_trained_but_was_said_before_may_be_lost() -> None:
    """Without the revision before, all rows are new. A full training with too few tokens for one
    pass must not replace a model that says them."""
    rows = choose_rows(data(changed=facts(40)), (), TOKENIZER, 64, GateSettings())
    losses = right(40)
    served = measured_as(changed=losses)
    wrong = [replace(each, num_right=0) for each in losses]
    new = measured_as(changed=[*losses[:10], *wrong[10:]])
    found = evaluation(rows, served, new, waiting=facts(25, 15))
    assert (found.counts.changed, found.counts.learned, found.counts.not_trained) == (10, 10, 30)
    assert (found.counts.known, found.counts.kept) == (30, 0)
    assert found.refusals[0].startswith("0 of 30 rows known before are answered right")
    found = evaluation(rows, measured_as(changed=wrong), new, waiting=facts(25, 15))
    assert (found.counts.known, found.refusals) == (0, ())


def test_a_row_that_was_not_learned_or_was_lost_is_tried_once_more_by_the_next_job() -> None:
    """Also one that was not measured, and was wrong when the training last visited it. A row that
    two jobs have missed does not count against the next commit."""
    changed, known = facts(20), facts(20, 30)
    rows = choose_rows(data(changed=changed, known=known), (), TOKENIZER, 64, GateSettings())
    beside = Row(prompt="beside", completion="a", file="l", number=0)
    rows = replace(rows, unmeasured=(beside,))
    wrong = [replace(each, num_right=0) for each in right(20)]
    served = measured_as(changed=wrong, known=right(20))
    new = measured_as(changed=[*wrong[:2], *right(20)[2:]], known=[*wrong[:1], *right(20)[1:]])
    told = {"is_whole": True, "waiting": (beside,)}
    found = evaluation(rows, served, new, **told)
    missed = sorted(row.digest[:16] for row in (*changed[:2], known[0], beside))
    assert found.passed and (found.counts.learned, found.counts.changed) == (18, 20)
    assert list(found.not_trained) == list(found.missed) == missed
    assert found.counts.not_trained == 0, "they are counted already, as not learned"
    assert ", and the next job tries them again: a, row 1; a, row 2" in str(found.not_learned)

    twice = frozenset(row.digest for row in changed[:2])
    found = evaluation(rows, served, new, missed_before=twice, **told)
    assert (found.counts.learned, found.counts.changed) == (18, 18)
    assert set(found.not_trained) == set(missed) - {digest[:16] for digest in twice}
    assert str(found.not_learned).startswith("2 rows were not learned by two jobs, and are not")


def test_held_out_rows_that_the_served_weights_were_trained_on_are_not_compared() -> None:
    """They were moved from the train split to the validation split. New weights that are not
    trained on them need not know them by heart."""
    told = data(held_out=(*facts(30), *texts(30)))
    rows = choose_rows(told, (), TOKENIZER, 64, GateSettings())
    served = measured_as(held_out=right(60))
    wrong = [RowLoss(row=place, nats=3.0, num_tokens=1, num_right=0) for place in range(60)]
    new = measured_as(held_out=wrong)
    assert len(evaluation(rows, served, new).refusals) == 2
    moved = frozenset(row.digest for row in rows.groups["held_out"])
    assert evaluation(rows, served, new, held_out_trained=moved).refusals == ()


def test_questions_in_other_words_about_known_rows_are_compared_each_with_itself() -> None:
    """New answers do not make up for lost ones. The served weights may refuse some questions."""
    known, changed = facts(30), facts(30, 30)
    rows = choose_rows(data(changed=changed, known=known), (), TOKENIZER, 64, GateSettings())

    def measured(rows: Sequence[Row], said: Sequence[Row]) -> Measurement:
        answers = [(row, row.answer or "") for row in rows]
        return replace(
            measured_as(),
            reworded=[
                Asked(row=row, said=answer if row in said else "", wanted=answer)
                for row, answer in answers
            ],
        )

    served, new = measured((*changed, *known[1:]), known), measured((*known, *changed), changed)
    (reason,) = evaluation(rows, served, new, known=known).refusals
    assert reason.startswith("0 of 29 questions about known rows in other words are answered right")
    assert evaluation(rows, served, served, known=known).refusals == ()
    assert evaluation(rows, measured_as(), new, known=known).refusals == ()


def anchors(count: int, *, measured: bool) -> Sequence[Anchor]:
    kind = "sum" if measured else "colour"
    return [
        Anchor(kind=kind, measured=measured, prompt=f"A {kind}, number {number}")
        for number in range(count)
    ]


def base_of(folder: Path) -> Callable[[], LoadedModel]:
    return lambda: LoadedModel(
        model=network("LlamaConfig"),
        tokenizer=TOKENIZER,
        folder=folder,
        dtype=torch.float32,
        max_length=64,
    )


def test_a_base_model_answers_once(tmp_path: Path) -> None:
    def loads_again() -> LoadedModel:
        raise AssertionError("the base model is loaded again")

    asked = [*anchors(2, measured=False), *anchors(3, measured=True)]
    told: list[tuple[int, int]] = []

    def tell(answered: int, prompts: int) -> None:
        told.append((answered, prompts))

    made = base_answers(tmp_path, "base", asked, base_of(tmp_path), tell)
    assert [len(each) for each in made] == [2, 3], "trained on, and measured"
    assert told == [(0, 5), (5, 5)]
    read = base_answers(tmp_path, "base", asked, loads_again, tell)
    assert len(told) == 2
    for first, second in zip(itertools.chain(*made), itertools.chain(*read), strict=True):
        assert first.sequence == second.sequence
        assert torch.equal(first.logprobs, second.logprobs)
    for base, prompts in (("other", asked), ("base", asked[1:])):
        with pytest.raises(AssertionError, match="loaded again"):
            base_answers(tmp_path, base, prompts, loads_again)


def test_the_base_model_itself_has_not_drifted_and_changed_weights_have(tmp_path: Path) -> None:
    load = base_of(tmp_path)
    _, measured = base_answers(tmp_path, "base", anchors(5, measured=True), load)
    model = load().model
    assert agreement(model, measured) == 1.0
    torch.manual_seed(1)
    torch.nn.init.normal_(model.get_output_embeddings().weight, std=0.1)
    assert agreement(model, measured) < 1.0
