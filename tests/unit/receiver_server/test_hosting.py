"""A receiver in a process that has the variables of a Space."""

from pathlib import Path

import pytest

from receiver.errors import AddressUnavailable, OpenToEveryone
from receiver.payload import WebhookPayload
from receiver.settings import ReceiverSettings
from receiver.webhooks_server import WebhooksServer
from tests.ports import free_port


@pytest.fixture
def space(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GRADIO_SERVER_NAME", raising=False)
    monkeypatch.delenv("GRADIO_SERVER_PORT", raising=False)
    monkeypatch.setenv("SPACE_ID", "ada/receiver")
    monkeypatch.setenv("SPACE_HOST", "ada-receiver.hf.space")
    return monkeypatch


@pytest.mark.parametrize(
    "given", [None, ReceiverSettings(proof="github"), ReceiverSettings(public_url=None)]
)
def test_it_listens_on_every_address_at_port_7860(
    space: pytest.MonkeyPatch, given: ReceiverSettings | None
) -> None:
    settings = WebhooksServer(webhook_secret="s3cret", settings=given).settings
    assert (settings.host, settings.port) == ("0.0.0.0", 7860)
    assert settings.public_url == "https://ada-receiver.hf.space"


def test_what_the_script_sets_stays(space: pytest.MonkeyPatch) -> None:
    own = ReceiverSettings(host="127.0.0.1", port=0, public_url="https://mine.example")
    assert WebhooksServer(webhook_secret="s3cret", settings=own).settings == own


def test_outside_of_a_space_nothing_changes(space: pytest.MonkeyPatch) -> None:
    space.delenv("SPACE_ID")
    assert WebhooksServer(webhook_secret="s3cret").settings == ReceiverSettings()


def test_it_prints_its_public_address_and_opens_no_tunnel(
    space: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    space.setenv("GRADIO_SERVER_NAME", "127.0.0.1")
    space.setenv("GRADIO_SERVER_PORT", str(free_port()))
    settings = ReceiverSettings(tunnel=f"touch {tmp_path}/opened")
    server = WebhooksServer(webhook_secret="s3cret", settings=settings)

    @server.add_webhook("/hello")
    async def hello(payload: WebhookPayload) -> None: ...

    url = server.launch(prevent_thread_lock=True, share=True)
    server.close()
    assert url == "https://ada-receiver.hf.space"
    assert f"  - POST {url}/webhooks/hello" in capsys.readouterr().out.splitlines()
    # Neither a tunnel nor a file that remembers URLs: the address of a Space does not change.
    assert list(tmp_path.iterdir()) == []


def test_without_a_secret_it_does_not_start(space: pytest.MonkeyPatch) -> None:
    space.setenv("GRADIO_SERVER_NAME", "127.0.0.1")
    server = WebhooksServer()
    server.add_webhook("/hello")(lambda payload: None)
    with pytest.raises(OpenToEveryone, match="In a Space, add `WEBHOOK_SECRET` to its secrets"):
        server.launch(prevent_thread_lock=True)


def test_a_host_that_is_none_is_named(space: pytest.MonkeyPatch) -> None:
    space.setenv("SPACE_HOST", "a b/c")
    with pytest.raises(AddressUnavailable, match="SPACE_HOST='a b/c' is not a host name"):
        WebhooksServer(webhook_secret="s3cret")
