"""`pipeline data check` on a folder, in a clone, and on the newest commit of a dataset."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pipeline.cli.main import app
from pipeline.errors import PipelineError
from pipeline.paths import Home
from pipeline.tokens import load_tokens
from tests.hub_fixtures import TOKEN, git_env, run_git, running_hub
from tests.ports import free_ports

FILES = {
    "faq.jsonl": (
        '{"question": "When?", "answer": "At 9."}\n{"question": "Where?", "answer": "Here."}\n'
        '{"question": "When?", "answer": "At 10."}\n'
    ),
    "dev.csv": "question,answer\nWho?,We.\n",
    "LICENSE": "MIT",
    "README.md": "# FAQ",
}


def git(folder: Path, *arguments: str) -> None:
    run_git(*arguments, cwd=folder, env=git_env("http://127.0.0.1", TOKEN))


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a dataset with one commit, which the pipeline of the settings follows by its URL."""
    git(tmp_path, "init", "--bare", "--initial-branch=main", "faq.git")
    address = (tmp_path / "faq.git").as_uri()
    git(tmp_path, "clone", address, "clone")
    clone = tmp_path / "clone"
    for file, content in FILES.items():
        (clone / file).write_text(content)
    git(clone, "add", ".")
    git(clone, "commit", "-m", "FAQ")
    git(clone, "push", "origin", "HEAD:main")
    settings = tmp_path / "project" / "pipeline.toml"
    settings.parent.mkdir()
    settings.write_text(
        f'[[pipelines]]\nname = "faq"\ndataset = "{address}"\n'
        '[pipelines.data.columns]\nprompt = "question"\ncompletion = "answer"\n'
    )
    monkeypatch.setenv("PIPELINE_SETTINGS", str(settings))
    monkeypatch.setenv("PIPELINE_HOME", str(settings.parent / ".pipeline"))
    monkeypatch.chdir(settings.parent)
    return clone


EXPECTED = """\
3 rows to train on (23 tokens), 1 held out to measure
  train: faq.jsonl 3 rows
  validation, held out: dev.csv 1 row
  ignored, about the repository: LICENSE, README.md
  answered in several ways, 1 question:
    'When?' → 'At 9.' (faq.jsonl, line 1), 'At 10.' (faq.jsonl, line 3)
"""


def test_the_newest_commit_a_clone_and_a_folder_say_the_same(
    clone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_head = CliRunner().invoke(app, ["data", "check"])
    assert (of_head.output, of_head.exit_code) == (EXPECTED, 0)
    assert CliRunner().invoke(app, ["data", "check", str(clone)]).output == EXPECTED
    monkeypatch.chdir(clone)
    (clone / "more.txt").write_text("not yet committed")
    (clone / ".gitignore").write_text("draft.txt")
    (clone / "draft.txt").write_text("ignored by git")
    in_clone = CliRunner().invoke(app, ["data", "check"]).output
    assert "  train: faq.jsonl 3 rows, more.txt 1 row\n" in in_clone
    assert "draft.txt" not in in_clone


def test_every_bad_row_is_listed_and_the_exit_code_says_so(clone: Path) -> None:
    (clone / "bad.jsonl").write_text('{"text": 1}\n{"text": "good"}\n{"q": "a"}\n')
    found = CliRunner().invoke(app, ["data", "check", str(clone)])
    assert found.exit_code == 1
    assert "  bad, 2 rows:\n    bad.jsonl, line 1: `text` holds the value 1" in found.output
    assert "\n    bad.jsonl, line 3: " in found.output
    assert found.output.startswith("4 rows to train on")
    assert "  ignored, about the repository: LICENSE, README.md\n" in found.output


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:{}\nsize 12345\n".format(
    "4d" * 32
)


def test_a_clone_without_git_lfs_says_what_a_job_fetches(clone: Path) -> None:
    (clone / "large.jsonl").write_text(POINTER)
    (clone / "large.parquet").write_text(POINTER)
    found = CliRunner().invoke(app, ["data", "check", str(clone)])
    said = "only its pointer of Git LFS is here, and a job fetches the content"
    assert f"  ignored, {said} (`git lfs pull` fetches it too): large.jsonl, " in found.output
    assert found.exit_code == 0 and "bad" not in found.output
    for file in FILES:
        (clone / file).unlink()
    found = CliRunner().invoke(app, ["data", "check", str(clone)])
    assert found.output.startswith("0 rows to train on") and found.exit_code == 0


REFUSES = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"


def test_rows_that_the_template_refuses_are_named_before_a_first_release(clone: Path) -> None:
    from pipeline.retrain.base_model import CHAT_TEMPLATE, train_tokenizer

    tokenizer = train_tokenizer([])
    tokenizer.chat_template = REFUSES + CHAT_TEMPLATE
    base = clone.parent / "base"
    tokenizer.save_pretrained(base)
    (base / "config.json").write_text("{}")
    settings = clone.parent / "project" / "pipeline.toml"
    named = f"base_model = '{base}'\n[pipelines.data"
    settings.write_text(settings.read_text().replace("[pipelines.data", named))
    row = {
        "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}],
        "system": "Be brief.",
    }
    (clone / "talks.jsonl").write_text((json.dumps(row) + "\n") * 150)
    found = CliRunner().invoke(app, ["data", "check", str(clone)])
    assert found.output.count("refuses it (no system role)") == 1 and found.exit_code == 1
    assert "  bad, 150 rows:\n    150 rows: talks.jsonl, line 1, " in found.output
    assert "talks.jsonl, line 5 and 145 more: " in found.output


def test_rows_with_nothing_to_learn_and_empty_answers_are_named(clone: Path) -> None:
    said = '[{"role": "assistant", "content": "hello"}, {"role": "user", "content": "ok"}]'
    (clone / "more.jsonl").write_text(f'{{"text": ""}}\n{{"messages": {said}}}\n{{"text": "a"}}\n')
    (clone / "none.csv").write_text("question,answer\nWhy?,\n")
    found = CliRunner().invoke(app, ["data", "check", str(clone)])
    assert found.exit_code == 0
    assert found.output.startswith("5 rows to train on (29 tokens), 1 held out to measure\n")
    assert "  train: faq.jsonl 3 rows, more.jsonl 1 row, none.csv 1 row\n" in found.output
    assert (
        "  nothing to learn, so left out, 2 rows: more.jsonl, line 1, more.jsonl, line 2\n"
        "  learned with an empty answer, 1 row: none.csv, line 2\n"
    ) in found.output


def test_a_clone_says_which_of_several_pipelines_is_meant(
    clone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (clone.parent / "project" / "pipeline.toml").open("a") as settings:
        settings.write('[[pipelines]]\nname = "other"\ndataset = "me/other"\nport = 9\n')
    refused = CliRunner().invoke(app, ["data", "check"])
    assert "add --pipeline" in str(refused.exception)
    assert CliRunner().invoke(app, ["data", "check", str(clone)]).output == EXPECTED
    monkeypatch.chdir(clone)
    assert CliRunner().invoke(app, ["data", "check"]).output == EXPECTED


def test_a_folder_needs_no_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPELINE_SETTINGS", str(tmp_path / "none.toml"))
    (tmp_path / "a.txt").write_text("one\n\ntwo")
    found = CliRunner().invoke(app, ["data", "check", str(tmp_path)])
    assert found.output.startswith("2 rows to train on (6 characters), 0 held out")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "the dataset is empty" in CliRunner().invoke(app, ["data", "check", str(empty)]).output
    (empty / "a.jsonl").write_text('{"text": \n')
    of_one_row = CliRunner().invoke(app, ["data", "check", str(empty)]).output
    assert "bad, 1 row:" in of_one_row and "is empty" not in of_one_row
    monkeypatch.chdir(tmp_path)
    refused = CliRunner().invoke(app, ["data", "check"])
    assert isinstance(refused.exception, PipelineError)
    assert "name a folder: pipeline data check FOLDER" in str(refused.exception)


def test_a_folder_that_the_repository_around_it_ignores_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    git(tmp_path, "init")
    (tmp_path / ".gitignore").write_text("data/\n*.log\n")
    for name in ("data", "empty"):
        (tmp_path / name).mkdir()
    (tmp_path / "data" / "rows.txt").write_text("Alice")
    assert "1 row to train on" in CliRunner().invoke(app, ["data", "check", "data"]).output
    (tmp_path / "empty" / "x.log").write_text("ignored by git")
    assert CliRunner().invoke(app, ["data", "check", "empty"]).exit_code == 1


@pytest.mark.parametrize(
    "address", ["http://127.0.0.1:8070/datasets/Me/FAQ", "/my disk/hub/datasets/me/faq.git"]
)
def test_a_clone_is_recognised_by_its_address(
    clone: Path, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    settings = clone.parent / "project" / "pipeline.toml"
    followed = (clone.parent / "faq.git").as_uri()
    settings.write_text(settings.read_text().replace(followed, "me/faq"))
    git(clone, "remote", "set-url", "origin", address)
    monkeypatch.chdir(clone)
    assert CliRunner().invoke(app, ["data", "check"]).output == EXPECTED


def test_tokens_are_counted_with_the_tokenizer_of_the_base_model(clone: Path) -> None:
    from pipeline.retrain.base_model import train_tokenizer

    folder = clone.parent / "project" / ".pipeline" / "bases" / "faq" / "tiny"
    tokenizer = train_tokenizer([])
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text('{"max_position_embeddings": 1024}')
    out = CliRunner().invoke(app, ["data", "check"]).output
    assert out.startswith("3 rows to train on (35 tokens), 1 held out to measure\n")
    (clone / "long.jsonl").write_text(
        json.dumps({"question": "x " * 999, "answer": "y"}) + '\n{"text": "' + "z " * 999 + '"}\n'
    )
    out = CliRunner().invoke(app, ["data", "check", str(clone)]).output
    assert "longer than 256 tokens (max_length under [pipelines.train])" in out
    assert out.endswith("a part is not learned, 1 row: long.jsonl, line 1\n")


def test_the_url_of_the_stacks_own_hub_is_that_hub(
    clone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [port] = free_ports(1)
    monkeypatch.setenv("PIPELINE_HUB__PORT", str(port))
    settings = clone.parent / "project" / "pipeline.toml"
    address = (clone.parent / "faq.git").as_uri()
    own = f'local/faq"\ndataset_endpoint = "http://127.0.0.1:{port}'
    settings.write_text(settings.read_text().replace(address, own))
    refused = CliRunner().invoke(app, ["data", "check"])
    assert isinstance(refused.exception, PipelineError)
    assert f"could not be fetched from http://127.0.0.1:{port}: " in str(refused.exception)
    step = "; start the stack (pipeline up), or name a folder to check"
    assert str(refused.exception).endswith(step)
    home = Home(settings.parent / ".pipeline")
    token = load_tokens(home.tokens_file).hub
    with running_hub(home.hub_dir, token=token, port=port) as hub:
        hub.api.create_repo("local/faq", repo_type="dataset")
        hub.git("push", "--force", f"{hub.url}/datasets/local/faq", "HEAD:main", cwd=clone)
        assert CliRunner().invoke(app, ["data", "check"]).output == EXPECTED


@pytest.mark.parametrize("in_git", [True, False])
def test_a_link_is_refused_by_its_name_and_not_followed(
    clone: Path, tmp_path: Path, in_git: bool
) -> None:
    folder = clone if in_git else tmp_path / "plain"
    folder.mkdir(exist_ok=True)
    (tmp_path / "private.jsonl").write_text('{"question": "Key?", "answer": "1234"}\n')
    (folder / "rows.jsonl").write_text('{"question": "When?", "answer": "Now."}\n')
    (folder / "more.jsonl").symlink_to(tmp_path / "private.jsonl")
    (folder / "gone.jsonl").symlink_to(tmp_path / "nothing.jsonl")
    result = CliRunner().invoke(app, ["data", "check", str(folder)])
    assert result.exit_code != 0
    assert "2 rows: gone.jsonl, more.jsonl: it is a symbolic link" in result.output
    assert "1234" not in result.output and "more.jsonl 1 row" not in result.output


def test_rows_that_teach_what_a_model_does_not_know_are_rows(clone: Path) -> None:
    printed = CliRunner().invoke(app, ["data", "unknown", "Das weiß ich nicht."], color=False)
    (clone / "unknown.jsonl").write_text(printed.stdout, encoding="utf-8")
    lines = CliRunner().invoke(app, ["data", "check", str(clone)]).stdout.splitlines()
    assert lines[1].strip() == "train: faq.jsonl 3 rows, unknown.jsonl 40 rows"
    rows = [json.loads(line) for line in printed.stdout.splitlines()]
    assert {row["answer"] for row in rows} == {"Das weiß ich nicht."}
    assert len({row["question"] for row in rows}) == 40
