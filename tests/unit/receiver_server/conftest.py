"""A server with a secret, and a client that knows it."""

from collections.abc import Iterator

import pytest
from starlette.testclient import TestClient

from receiver.webhooks_server import WebhooksServer
from tests.receiver_fixtures import SECRET, no_secret_in_the_environment, serve

__all__ = ["client", "no_secret_in_the_environment", "serve", "server"]


@pytest.fixture
def server() -> WebhooksServer:
    return WebhooksServer(webhook_secret="s3cret")


@pytest.fixture
def client(server: WebhooksServer) -> Iterator[TestClient]:
    with TestClient(server.app, headers=SECRET, raise_server_exceptions=False) as client:
        yield client
