"""`pipeline releases` against real release folders and a real server."""

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from pipeline.cli.main import app
from pipeline.errors import PipelineError
from pipeline.paths import Home
from pipeline.tokens import load_tokens
from serving.app import create_app
from serving.engines.echo_engine import EchoEngine
from serving.settings import ServingSettings
from serving.weights import releases
from tests.serving_fixtures import echo_release, running
from tests.stack_fixtures import free_ports

Configure = Callable[[int], Path]


@pytest.fixture
def configure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Configure:
    """Settings with a server port; the folder of the releases."""

    def write(port: int) -> Path:
        (tmp_path / "pipeline.toml").write_text(
            f'[[pipelines]]\nname = "answers"\ndataset = "me/facts"\nport = {port}\n'
        )
        pipeline_dir = Home.find().releases_dir / "answers"
        pipeline_dir.mkdir(parents=True, exist_ok=True)
        return pipeline_dir

    monkeypatch.setenv("PIPELINE_SETTINGS", str(tmp_path / "pipeline.toml"))
    monkeypatch.setenv("PIPELINE_HOME", str(tmp_path / "home"))
    return write


def pipeline(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def test_a_swap_without_a_server_is_left_pending(configure: Configure) -> None:
    folder = configure(*free_ports(1))
    first, second = echo_release(folder, 1), echo_release(folder, 2)
    releases.set_current(folder, second.id)
    result = pipeline("releases", "rollback")
    assert result.exit_code == 0, result.output
    assert f"the next one to start will serve {first.id}" in result.output
    assert releases.pending_release(folder) == first.id


@pytest.mark.parametrize("token", ["own", "another"])
def test_the_marker_is_there_before_a_server_is_asked_and_gone_after(
    configure: Configure, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = configure(1)
    first = echo_release(folder, 1)
    seen = []
    set_pending = releases.set_pending

    def watch(pipeline_dir: Path, release_id: str) -> None:
        set_pending(pipeline_dir, release_id)
        seen.append(releases.pending_release(pipeline_dir))

    monkeypatch.setattr(releases, "set_pending", watch)
    server = create_app(
        engine=EchoEngine(),
        settings=ServingSettings(),
        releases_dir=folder,
        pipeline="answers",
        admin_token=load_tokens(Home.find().tokens_file).admin if token == "own" else "another",
    )
    with running(server) as url:
        configure(int(url.rpartition(":")[2]))
        result = pipeline("releases", "swap", first.id)
    assert seen == [first.id]
    assert releases.pending_release(folder) is None
    if token == "own":
        assert f"{first.id} is served" in result.output
    else:
        assert isinstance(result.exception, PipelineError)
        assert "not the server of this state folder" in str(result.exception)
