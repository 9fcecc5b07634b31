"""A server that stops answers each request that has not ended: none gets a 500."""

import asyncio
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from serving.http.server import Server


class Endless:
    """An application whose requests never end. Those to `/begun` have begun their answer."""

    def __init__(self) -> None:
        self.is_reached = threading.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/begun":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"one", "more_body": True})
        self.is_reached.set()
        await asyncio.Event().wait()


@pytest.mark.parametrize("path", ["/waits", "/begun"])
def test_a_request_that_outlasts_the_stop_gets_503_or_a_closed_connection(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    app = Endless()
    listener = socket.create_server(("127.0.0.1", 0))
    server = Server(app, shutdown_seconds=0, lifespan="off")
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}{path}"
    with ThreadPoolExecutor(1) as client:
        try:
            asked = client.submit(httpx.post, url, timeout=30)
            assert app.is_reached.wait(30)
        finally:
            server.should_exit = True
            thread.join()
            listener.close()
        if path == "/begun":
            with pytest.raises(httpx.RemoteProtocolError):
                asked.result()
        else:
            answer = asked.result()
            assert answer.status_code == 503
            assert "Send the request again" in answer.text
            assert answer.headers["Retry-After"] == "1"
    assert "Traceback" not in caplog.text
