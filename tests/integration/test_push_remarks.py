"""What a person who pushed is told at once: by git, and by the client of the Hub."""

import gzip
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.doctor.revision import MAX_BYTES, PushRemarks
from pipeline.retrain.settings import ColumnSettings, DataSettings
from pipeline.settings import PipelineSettings
from tests.hub_fixtures import RunningHub, running_hub

FOLLOWED = [
    PipelineSettings(name="facts", dataset="local/facts"),
    PipelineSettings(name="beta", dataset="local/facts", ref="beta"),
    PipelineSettings(name="spelled", dataset="local/spelled"),
    PipelineSettings(name="moved", dataset="local/old"),
    PipelineSettings(name="elsewhere", dataset="local/two", ref="beta"),
    PipelineSettings(
        name="columns", dataset="local/two", data=DataSettings(columns=ColumnSettings(prompt="q"))
    ),
    PipelineSettings(name="plain", dataset="local/two"),
    PipelineSettings(name="also-plain", dataset="local/two"),
]


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningHub]:
    folder = tmp_path_factory.mktemp("hub")
    with running_hub(folder, remarks_on=PushRemarks(FOLLOWED)) as hub:
        yield hub


@pytest.fixture(scope="module")
def clone(hub: RunningHub, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clone")
    hub.git("init", "-q", cwd=folder)
    hub.git("remote", "add", "origin", hub.create_dataset("local/facts"), cwd=folder)
    return folder


def push(hub: RunningHub, clone: Path, files: dict[str, str], branch: str = "main") -> list[str]:
    """The lines that git prints for the person, without the last one, which names a page."""
    for path, text in files.items():
        (clone / path).write_text(text)
    hub.git("add", "-A", cwd=clone)
    hub.git("commit", "-qm", "Change", cwd=clone)
    printed = hub.git("push", "--force", "origin", f"HEAD:{branch}", cwd=clone)
    lines = [line.removeprefix("remote: ").strip() for line in printed.splitlines()]
    told = [
        told for told, line in zip(lines, printed.splitlines(), strict=True) if "remote:" in line
    ]
    if not branch.startswith("refs/"):  # only a branch's commit can become a job
        page = told.pop()
        assert page.startswith(f"What becomes of it: {hub.url}/datasets/local/")
        assert page.endswith("/commit/" + hub.git("rev-parse", "HEAD", cwd=clone).strip())
    return told


GOOD = '{"prompt": "a", "completion": "b"}\n'


def test_an_unexpected_error_of_the_check_does_not_refuse_the_push(
    hub: RunningHub, clone: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def breaks(*_: object) -> None:
        raise TypeError("unhashable")

    monkeypatch.setattr("pipeline.doctor.revision.read_dataset", breaks)
    assert push(hub, clone, {"good.jsonl": GOOD * 2}) == []
    (record,) = [each for each in caplog.records if "was not checked" in each.message]
    assert record.exc_info is not None, "the log has the traceback"


def test_a_branch_that_nobody_follows_is_told(hub: RunningHub, clone: Path) -> None:
    told = push(hub, clone, {"more.jsonl": GOOD}, branch="main2")
    assert told == ["No pipeline follows the branch 'main2'; pipelines follow beta, main."]
    assert push(hub, clone, {"other.jsonl": GOOD}, branch="beta") == []


def test_a_row_that_cannot_be_read_is_told_with_file_and_line(hub: RunningHub, clone: Path) -> None:
    bad = GOOD * 2 + "{no json\n" + GOOD
    first, last = push(hub, clone, {"bad.jsonl": bad, "good2.jsonl": GOOD})
    assert first.startswith("bad.jsonl, line 3")
    assert last == "The job of facts will fail until this is corrected."
    # The next push does not touch the bad file, so it is told nothing of it.
    assert push(hub, clone, {"good3.jsonl": GOOD}) == []


def test_a_compressed_file_is_not_opened(hub: RunningHub, clone: Path) -> None:
    (clone / "bomb.jsonl.gz").write_bytes(gzip.compress(b"{no json\n"))
    assert push(hub, clone, {"good4.jsonl": GOOD}) == []


def test_a_push_that_is_too_large_to_check_is_told(hub: RunningHub, clone: Path) -> None:
    text = "{no json\n" + GOOD * (1 + MAX_BYTES // len(GOOD))
    assert push(hub, clone, {"long.jsonl": text}) == [
        "The hub checked no rows of this push: README.md and the changed text files have more "
        "than 4 MiB together. The job of facts will check all rows."
    ]


def test_a_large_file_that_was_not_uploaded_is_told(hub: RunningHub, clone: Path) -> None:
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'a' * 64}\nsize 9\n"
    for file in ("large.jsonl", "large.parquet"):
        first, _ = push(hub, clone, {file: pointer})
        advice = "run `git lfs push --all origin`."
        assert first == f"{file}: this large file was not uploaded: {advice}"


def test_a_link_is_told_and_its_target_is_not_read_as_rows(hub: RunningHub, clone: Path) -> None:
    (clone / "link.jsonl").symlink_to("good.jsonl")
    assert push(hub, clone, {}) == [
        "link.jsonl: it is a symbolic link; put the file itself in its place.",
        "The job of facts will fail until this is corrected.",
    ]
    (clone / "link.jsonl").unlink()


def test_the_client_of_the_hub_is_told_too(
    hub: RunningHub, clone: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("sent.jsonl", "again.jsonl"):
        hub.api.upload_file(
            path_or_fileobj=b"{no json",
            path_in_repo=name,
            repo_id="local/facts",
            repo_type="dataset",
        )
        assert f"{name}, line 1" in caplog.text
    assert "one JSON object. The job of facts will fail until this is corrected." in caplog.text


def test_characters_for_a_terminal_are_not_passed_on(hub: RunningHub, clone: Path) -> None:
    told = push(hub, clone, {"a\u202eb.jsonl": "{no json\n"})
    assert "a?b.jsonl, line 1" in told[0]


def test_names_are_compared_without_case(hub: RunningHub, tmp_path: Path) -> None:
    hub.git("init", "-q", cwd=tmp_path)
    hub.git("remote", "add", "origin", hub.create_dataset("local/SPELLED"), cwd=tmp_path)
    told = push(hub, tmp_path, {"rows.jsonl": GOOD}, branch="other")
    assert told == ["No pipeline follows the branch 'other'; pipelines follow main."]


def test_each_way_to_read_the_branch_is_checked(hub: RunningHub, tmp_path: Path) -> None:
    hub.git("init", "-q", cwd=tmp_path)
    hub.git("remote", "add", "origin", hub.create_dataset("local/two"), cwd=tmp_path)
    row = GOOD.replace("prompt", "q")
    fails = "The job of {} will fail until this is corrected.".format
    bad, *told = push(hub, tmp_path, {"rows.jsonl": row})
    assert bad.startswith("rows.jsonl, line 1")
    assert told == [fails("plain"), fails("also-plain")]
    bad, *told = push(hub, tmp_path, {"bad.jsonl": "{no json\n"})
    assert bad.startswith("bad.jsonl, line 1")
    assert told == [fails("columns"), fails("plain"), fails("also-plain")]
    # The pull request is for main, so no pipeline of another branch counts.
    opened = hub.api.create_pull_request("local/two", "Rows", repo_type="dataset")
    told = push(hub, tmp_path, {"rows2.jsonl": row}, branch=str(opened.git_reference))
    assert [line for line in told if "The job of" in line] == [
        fails("plain"),
        fails("also-plain"),
    ]


def test_files_that_a_readme_leaves_out_are_told(hub: RunningHub, clone: Path) -> None:
    push(hub, clone, {"kept.jsonl": GOOD, "lost.jsonl": GOOD})
    card = "---\nconfigs:\n- config_name: default\n  data_files: kept.jsonl\n---\n"
    [told] = push(hub, clone, {"README.md": card})
    assert told.startswith("facts reads no rows of ") and ", good.jsonl, " in told
    assert "kept.jsonl" not in told
    [told] = push(hub, clone, {"other.jsonl": GOOD * 2})
    assert told.startswith("facts reads no rows of other.jsonl: ")
    (clone / "README.md").unlink()
    assert push(hub, clone, {"last.jsonl": GOOD}) == []
