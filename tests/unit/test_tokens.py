import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cryptography.fernet import Fernet

from pipeline.errors import PipelineError
from pipeline.tokens import load_tokens, read_tokens


def test_tokens_are_made_once_and_only_their_owner_can_read_them(tmp_path: Path) -> None:
    file = tmp_path / "home" / "tokens.json"
    tokens = load_tokens(file)
    assert load_tokens(file) == tokens
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert len({tokens.hub, tokens.admin, tokens.webhook, tokens.key}) == 4
    assert list(file.parent.iterdir()) == [file]


def test_processes_that_start_at_once_read_the_same_tokens(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        seen = set(pool.map(lambda _: load_tokens(tmp_path / "tokens.json"), range(32)))
    assert len(seen) == 1


@pytest.mark.parametrize("text", ["", "[]", '{"hub": "a"}', "not json"])
def test_a_damaged_file_is_left_alone_and_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "tokens.json"
    file.write_text(text)
    with pytest.raises(PipelineError, match=str(file)):
        load_tokens(file)
    assert file.read_text() == text


def test_who_only_reads_creates_no_tokens(tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match=r"tokens\.json does not exist; copy it from the hub's"):
        read_tokens(tmp_path / "tokens.json")
    assert not list(tmp_path.iterdir())


def test_the_environment_can_hold_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = Fernet.generate_key().decode()
    monkeypatch.setenv("PIPELINE_SECRET_KEY", key)
    assert load_tokens(tmp_path / "tokens.json").key == key
    assert key not in (tmp_path / "tokens.json").read_text()
    monkeypatch.setenv("PIPELINE_SECRET_KEY", "short")
    with pytest.raises(PipelineError, match="PIPELINE_SECRET_KEY"):
        load_tokens(tmp_path / "tokens.json")
