"""One service in a process of its own, as its command starts it: `SERVICE FOLDER PORT`."""

import sys
from pathlib import Path


def hub(folder: Path, port: int) -> None:
    from pipeline.hub.app import create_app
    from pipeline.hub.server import serve
    from pipeline.hub.settings import HubSettings
    from tests.hub_fixtures import TOKEN

    settings = HubSettings(port=port)
    key = b"ZmRmZGZkZmRmZGZkZmRmZGZkZmRmZGZkZmRmZGZkZmQ="
    serve(create_app(settings, folder / "hub", token=TOKEN, secret_key=key), settings)


def receiver(folder: Path, port: int) -> None:
    from receiver.server import WebhookPayload, WebhooksServer
    from receiver.settings import ReceiverSettings

    settings = ReceiverSettings(port=port)
    server = WebhooksServer(settings=settings)

    @server.add_webhook
    async def seen(payload: WebhookPayload) -> None: ...

    server.launch()


def server(folder: Path, port: int) -> None:
    from serving.app import create_app
    from serving.server import serve
    from serving.settings import ServingSettings
    from serving.weights.release_store import set_current
    from tests.echo_engine import EchoEngine
    from tests.serving_fixtures import ADMIN_TOKEN, echo_release

    set_current(folder, echo_release(folder, 1).id)
    settings = ServingSettings(port=port)
    app = create_app(
        engine=EchoEngine(),
        settings=settings,
        releases_dir=folder,
        pipeline="answers",
        admin_token=ADMIN_TOKEN,
    )
    serve(app, settings)


if __name__ == "__main__":
    _, service, folder, port = sys.argv
    {"hub": hub, "receiver": receiver, "server": server}[service](Path(folder), int(port))
