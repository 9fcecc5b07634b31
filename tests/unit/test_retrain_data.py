"""What a commit is trained on, what is held out, and what is gone. When a job ends without
training: a push, a job by hand, and one that a person insists on."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.retrain.base_model import files_digest
from pipeline.retrain.data import TrainingData, compare_revisions, is_unchanged
from pipeline.retrain.errors import DataError
from pipeline.retrain.job import DatasetSnapshot, Parent
from pipeline.retrain.rows import Row
from pipeline.retrain.settings import RetrainSettings, TrainSettings
from pipeline.retrain.sources import Revision
from serving.weights.release import Lineage

Files = Mapping[str, str]


class Dataset:
    """Commits of files; what each gives to train on, after the one before."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.num_commits = 0
        self.last: Revision | None = None
        self.digest: str | None = None

    def commit(self, files: Files, /, parent: Parent | None = None, **data: Any) -> TrainingData:
        folder = self.folder / str(self.num_commits)
        for path, content in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(content)
        revision = Revision(sha=f"{self.num_commits:040x}", folder=folder, files=tuple(files))
        if self.last is not None and parent is None:
            parent = parent_of(self.last, self.digest)
        snapshot = DatasetSnapshot(
            revision=revision,
            base=self.last,
            parent=parent.id if parent is not None else None,
        )
        self.last = revision
        self.num_commits += 1
        found = compare_revisions(snapshot, parent, retrain_settings(self.folder, data=data))
        self.digest = found.digest
        return found


def retrain_settings(folder: Path, **settings: Any) -> RetrainSettings:
    return RetrainSettings(
        pipeline="facts",
        dataset="me/facts",
        releases_dir=folder / "releases",
        bases_dir=folder / "bases",
        **settings,
    )


def parent_of(revision: Revision, digest: str | None = None, **evaluation: Any) -> Parent:
    lineage = Lineage(
        base_model="preset:tiny",
        dataset="me/facts",
        dataset_revision=revision.sha,
        data_digest=digest,
        mode="delta",
    )
    return Parent(id="r000001-00000000", folder=Path(), lineage=lineage, evaluation=evaluation)


def facts(**answers: str) -> str:
    return "".join(
        json.dumps({"prompt": prompt, "completion": completion}) + "\n"
        for prompt, completion in answers.items()
    )


def said(rows: Sequence[Row]) -> list[str | None]:
    return [row.completion or row.text for row in rows]


def paragraphs(numbers: range, edited: Mapping[int, str] = {}) -> str:
    return "\n\n".join(edited.get(number, f"paragraph {number}") for number in numbers)


def test_all_rows_are_trained_on_where_nobody_holds_any_out(tmp_path: Path) -> None:
    data = Dataset(tmp_path).commit({"a.jsonl": facts(**{f"q{n}": f"a{n}" for n in range(2_000)})})
    assert len(data.changed) == len(data.rows) == 2_000
    assert data.held_out == ()


def test_an_edit_a_deletion_and_an_addition_are_told_row_by_row(tmp_path: Path) -> None:
    dataset = Dataset(tmp_path)
    dataset.commit({"a.jsonl": facts(q="1", r="2", s="3")})
    data = dataset.commit({"a.jsonl": facts(q="new", s="3", t="4")})
    assert (said(data.changed), said(data.known)) == (["new", "4"], ["3"])
    assert (said([old for old, _ in data.edited]), said(data.deleted)) == (["1"], ["2"])
    assert (data.num_before, data.num_lost, len(data.deleted)) == (3, 2, 1)
    assert data.mode == "delta", "a delta unlearns a few answers"
    assert [(row.prompt, row.completion) for row in data.forgotten] == [("r", "")]


def test_of_two_answers_to_a_question_the_one_that_is_left_is_learned_again(tmp_path: Path) -> None:
    dataset = Dataset(tmp_path)
    dataset.commit({"a.jsonl": facts(q="1") + facts(q="2", r="3")})
    data = dataset.commit({"a.jsonl": facts(q="2", r="3")})
    assert (said(data.deleted), said(data.changed), data.forgotten) == (["1"], ["2"], ())


def test_a_validation_split_is_held_out_and_a_test_split_left_alone(tmp_path: Path) -> None:
    files = {"a.jsonl": facts(q="1"), "val.jsonl": facts(r="2", q="1"), "test.jsonl": facts(s="3")}
    dataset = Dataset(tmp_path)
    data = dataset.commit(files)
    assert said(data.rows) == ["1"]
    assert said(data.held_out) == ["2"], "a row that is to be learned is not held out as well"
    data = dataset.commit({**files, "val.jsonl": facts(r="2", t="4")})
    assert said(data.held_out) == ["2", "4"]
    assert is_unchanged(
        data, parent_of(Revision(sha="0", folder=tmp_path, files=())), retrain_settings(tmp_path)
    )
    only_test = Dataset(tmp_path / "two").commit({"a.jsonl": facts(q="1"), "test.csv": "text\nx\n"})
    assert said(only_test.held_out) == ["x"]


def test_a_row_that_moves_to_the_validation_split_is_not_to_be_unlearned(tmp_path: Path) -> None:
    dataset = Dataset(tmp_path)
    dataset.commit({"a.jsonl": facts(q="1", r="2")})
    data = dataset.commit({"a.jsonl": facts(q="1"), "val.jsonl": facts(r="2")})
    assert (data.deleted, said(data.held_out)) == ((), ["2"])


def test_the_answers_of_a_conversation_that_goes_on_are_not_to_be_unlearned(
    tmp_path: Path,
) -> None:
    def talks(*conversations: str) -> str:
        return "".join(
            json.dumps(
                {
                    "messages": [
                        {"role": ("user", "assistant")[number % 2], "content": content}
                        for number, content in enumerate(each)
                    ]
                }
            )
            + "\n"
            for each in conversations
        )

    dataset = Dataset(tmp_path)
    dataset.commit({"a.jsonl": talks("qa", "rb", "sc")})
    longer = dataset.commit({"a.jsonl": talks("qaxd", "rb", "sc")})
    assert (len(longer.changed), longer.deleted, longer.num_lost) == (1, (), 0)
    shorter = dataset.commit({"a.jsonl": talks("qa", "sc")})
    assert [row.answer for row in shorter.deleted] == ["d", "b"]


def test_rows_that_were_trained_on_and_are_held_out_now_need_a_full_training(
    tmp_path: Path,
) -> None:
    dataset = Dataset(tmp_path)
    dataset.commit({"a.jsonl": facts(q="1", r="2"), "val.jsonl": facts(s="3")})
    moved = {"a.jsonl": facts(q="1", t="4"), "val.jsonl": facts(r="2", s="3")}
    data = dataset.commit(moved)
    (row,) = (row for row in data.held_out if row.completion == "2")
    assert data.held_out_trained == {row.digest}
    assert (data.mode, data.reason) == ("full", "1 rows that were trained on are held out now")
    data = dataset.commit(moved | {"a.jsonl": facts(q="1", t="5")})
    assert (data.mode, data.held_out_trained) == ("delta", frozenset())


def test_a_text_corpus_that_begins_to_hold_rows_out_is_trained_fully(tmp_path: Path) -> None:
    dataset = Dataset(tmp_path)
    assert dataset.commit({"a.txt": paragraphs(range(999))}).held_out == ()
    data = dataset.commit({"a.txt": paragraphs(range(1_000))})
    assert (data.mode, data.deleted, data.is_removal) == ("full", (), True)
    assert len(data.held_out_trained) in (len(data.held_out), len(data.held_out) - 1)
    assert f"{len(data.held_out_trained)} rows that were trained on" in data.reason
    assert dataset.commit({"a.txt": paragraphs(range(1_001))}).mode == "delta"


@pytest.mark.parametrize("file", ["val.jsonl", "test.jsonl"])
def test_rows_that_wait_for_a_training_and_are_held_out_now_wait_no_more(
    tmp_path: Path, file: str
) -> None:
    dataset = Dataset(tmp_path)
    kept = {"a.jsonl": facts(q="1"), "val.jsonl": facts(z="0")}
    first = dataset.commit({**kept, "b.jsonl": facts(r="2", s="3")})
    assert dataset.last is not None
    parent = parent_of(
        dataset.last,
        not_trained=[row.digest[:16] for row in first.rows[1:]],
        missed=[first.rows[1].digest[:16]],
    )
    data = dataset.commit({**kept, "b.jsonl": facts(r="2", s="3")}, parent)
    assert (data.mode, data.num_waiting, said(data.changed)) == ("delta", 2, ["2", "3"])
    assert data.missed_before == {first.rows[1].digest}
    assert not is_unchanged(data, parent, retrain_settings(tmp_path))
    held_out = {**kept, file: facts(r="2", s="3", z="0")}
    data = dataset.commit(held_out, parent)
    assert (data.num_waiting, data.changed, data.deleted) == (0, (), ())
    is_measured = file == "val.jsonl"  # so the job trains without them
    assert is_unchanged(data, parent, retrain_settings(tmp_path)) == (not is_measured)


def test_without_the_revision_before_any_held_out_row_may_have_been_trained_on(
    tmp_path: Path,
) -> None:
    dataset = Dataset(tmp_path)
    files = {"a.jsonl": facts(q="1"), "val.jsonl": facts(r="2")}
    assert dataset.commit(files).held_out_trained == frozenset()
    assert dataset.last is not None
    parent, dataset.last = parent_of(dataset.last), None
    assert len(dataset.commit(files, parent).held_out_trained) == 1


def test_data_that_is_held_out_whole_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"the dataset is empty; .*; test.jsonl is held out"):
        Dataset(tmp_path).commit({"test.jsonl": facts(q="1")})


def test_a_commit_whose_parent_cannot_be_read_any_more_is_trained_fully(tmp_path: Path) -> None:
    dataset = Dataset(tmp_path)
    dataset.commit({"a.jsonl": facts(q="1")})
    dataset.commit({"a.csv": "q,a\n1,2\n"}, columns={"prompt": "q", "completion": "a"})
    data = dataset.commit({"a.jsonl": facts(q="1")})
    assert data.mode == "full" and "cannot be read: a.csv" in data.reason


SHORT = '{"q": "1", "short": "one", "long": "the number one"}\n'
READ: dict[str, Any] = {"columns": {"prompt": "q", "completion": "short"}}


@pytest.mark.parametrize(
    "changed",
    [
        {"columns": {"prompt": "q", "completion": "long"}},
        {**READ, "files": ["**"]},
        {**READ, "splits": {"train": ["a.jsonl", "c.jsonl"]}},
        {**READ, "held_out_ratio": 0.4},
    ],
)
def test_rows_that_other_settings_would_have_read_do_not_count_as_trained(
    tmp_path: Path, changed: dict[str, Any]
) -> None:
    files = {
        "a.jsonl": "".join(SHORT.replace("1", str(number)) for number in range(20)),
        "b.jsonl": SHORT.replace("1", "b"),
        "c.jsonl": SHORT.replace("1", "c"),
    }
    before = {"files": ["a.jsonl", "c.jsonl"], "splits": {"train": ["a.jsonl"]}, **READ}
    if "held_out_ratio" in changed:
        before = READ
    dataset = Dataset(tmp_path)
    first = dataset.commit(files, **before)
    assert dataset.last is not None
    parent = parent_of(dataset.last, dataset.digest)
    again = dataset.commit({**files, "README.md": "new"}, **before)
    assert (again.mode, again.changed) == ("delta", ())
    assert is_unchanged(again, parent, retrain_settings(tmp_path, data=before))
    data = dataset.commit(files, parent, **changed)
    assert (data.mode, data.known, data.num_lost) == ("full", (), 0)
    assert "present settings under [pipelines.data]" in data.reason
    assert set(said(data.rows)) != set(said(first.rows)) or len(data.rows) != len(first.rows)
    assert not is_unchanged(data, parent, retrain_settings(tmp_path, data=changed))
    after = dataset.commit({**files, "c.jsonl": SHORT.replace("1", "d")}, **changed)
    assert after.mode == "delta"


def test_a_share_of_a_text_corpus_is_held_out_also_of_later_rows(tmp_path: Path) -> None:
    dataset = Dataset(tmp_path)
    first = dataset.commit({"a.txt": paragraphs(range(1_000))})
    assert 20 < len(first.held_out) < 45 and len(first.held_out) + len(first.rows) == 1_000
    edited = {int(str(row.text).split()[1]): f"edited {row.text}" for row in first.held_out[:3]}
    second = dataset.commit({"a.txt": paragraphs(range(3_000), edited)})
    assert set(first.held_out[3:]) < set(second.held_out) and 60 < len(second.held_out) < 135
    assert len(second.changed) == 2_003 - len(set(second.held_out) - set(first.held_out))
    assert (second.deleted, second.edited) == ((), ()), "what was never learned needs no unlearning"
    third = dataset.commit({"a.txt": paragraphs(range(3_000), edited)})
    assert third.changed == () and third.held_out == second.held_out


@pytest.mark.parametrize(
    "files",
    [
        {"a.txt": paragraphs(range(999))},
        {"a.txt": paragraphs(range(2_000)), "b.jsonl": facts(q="1")},
        {"a.txt": paragraphs(range(2_000)), "val.txt": "unseen"},
    ],
)
def test_no_share_is_held_out_of_few_texts_beside_answers_or_beside_a_split(
    tmp_path: Path, files: Files
) -> None:
    data = Dataset(tmp_path).commit(files)
    assert said(data.held_out) == (["unseen"] if "val.txt" in files else [])


def test_a_setting_holds_out_any_rows_by_their_hash(tmp_path: Path) -> None:
    answers = {f"q{n}": f"a{n}" for n in range(200)}
    data = Dataset(tmp_path).commit({"a.jsonl": facts(**answers)}, held_out_ratio=0.25)
    assert 30 < len(data.held_out) < 70
    assert len(data.held_out) + len(data.rows) == 200


LINES = st.lists(st.sampled_from("abcdefgh"), max_size=12)


@given(
    commits=st.lists(
        st.fixed_dictionaries({"a.jsonl": LINES, "val.jsonl": LINES}), min_size=1, max_size=4
    ),
    ratio=st.sampled_from([None, 0.3]),
)
@settings(max_examples=25, deadline=None)
def test_every_row_is_trained_on_or_held_out_and_none_is_both(
    tmp_path_factory: pytest.TempPathFactory,
    commits: list[dict[str, list[str]]],
    ratio: float | None,
) -> None:
    dataset = Dataset(tmp_path_factory.mktemp("data"))
    trained: set[str] = set()
    for commit in commits:
        files = {
            file: "".join(json.dumps({"text": line}) + "\n" for line in lines)
            for file, lines in commit.items()
        }
        if not commit["a.jsonl"]:
            continue
        data = dataset.commit(files, held_out_ratio=ratio)
        learned = {row.digest for row in data.rows}
        held_out = {row.digest for row in data.held_out}
        assert not learned & held_out
        read = {row.text for row in (*data.rows, *data.held_out)}
        assert read == set(commit["a.jsonl"] + commit["val.jsonl"])
        if ratio is None:
            assert {row.text for row in data.rows} == set(commit["a.jsonl"])
        assert sorted(data.changed + data.known, key=repr) == sorted(data.rows, key=repr)
        assert {row.digest for row in data.deleted} <= trained - learned - held_out
        assert {row.digest for row, _ in data.edited} <= trained
        trained = learned


LONGER = TrainSettings(max_epochs=99)


class Case:
    """A revision that the parent has seen, trained with the default settings."""

    def __init__(self, folder: Path) -> None:
        (folder / "a.jsonl").write_text('{"prompt": "q", "completion": "a"}\n')
        self.folder = folder
        revision = Revision(sha="0" * 40, folder=folder, files=("a.jsonl",))
        self.parent = parent_of(revision)
        self.snapshot = DatasetSnapshot(revision=revision, base=revision, parent=self.parent.id)
        self.trained_with(settings_digest=TrainSettings().digest())

    def trained_with(self, **lineage: Any) -> None:
        changed = self.parent.lineage.model_copy(update=lineage)
        self.parent = replace(self.parent, lineage=changed)

    def mode(self, **settings: Any) -> str:
        """How the job trains, or `unchanged`."""
        told = retrain_settings(self.folder, **settings)
        data = compare_revisions(self.snapshot, self.parent, told)
        self.trained_with(data_digest=data.digest)
        return "unchanged" if is_unchanged(data, self.parent, told) else data.mode


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path)


def test_a_push_without_a_changed_row_trains_nothing(case: Case) -> None:
    assert case.mode() == case.mode(train=LONGER) == "unchanged"


def test_other_training_settings_are_a_reason_for_a_job_by_hand(case: Case) -> None:
    assert case.mode(skip_if="nothing_changed") == "unchanged"
    assert case.mode(skip_if="nothing_changed", train=LONGER) == "full"
    often = TrainSettings(checkpoint_seconds=1)
    assert case.mode(skip_if="nothing_changed", train=often) == "unchanged"


def test_another_base_model_is_a_reason_for_everybody(case: Case) -> None:
    case.trained_with(base_model="another")
    assert case.mode() == "full"


def test_a_base_model_that_was_replaced_in_its_folder_is_another_one(
    case: Case, tmp_path: Path
) -> None:
    base = tmp_path / "base"
    base.mkdir()
    (base / "model.safetensors").write_bytes(b"weights")
    named = {"base_model": str(base)}
    case.trained_with(**named)
    assert case.mode(**named) == "unchanged", "a release of an older version"
    case.trained_with(base_files_digest=files_digest(str(base)))
    assert case.mode(**named) == case.mode(**named, skip_if="nothing_changed") == "unchanged"
    (base / "model.safetensors").write_bytes(b"other weights")
    assert case.mode(**named) == case.mode(**named, skip_if="nothing_changed") == "full"
    assert case.mode(**named, train=TrainSettings(mode="delta")) == "full"


def test_a_person_who_asks_gets_a_training_in_the_mode_that_was_asked_for(case: Case) -> None:
    assert case.mode(skip_if="never") == "full"
    assert case.mode(skip_if="never", train=TrainSettings(mode="delta")) == "delta"
    assert case.mode(skip_if="nothing_changed", force_reason="I know") == "full"
