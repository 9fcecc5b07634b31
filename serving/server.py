"""Binds the port, then starts the application behind it."""

import asyncio
import errno
import gc
import ipaddress
import signal
import socket

import uvicorn
from fastapi import FastAPI

from serving.admission import Admission
from serving.engine_choice import choose_engine
from serving.errors import PortBusy, ServingError
from serving.http.connections import Limits
from serving.http.server import Server, http_config
from serving.settings import ServingSettings

SHUTDOWN_SECONDS = 10
"""For requests that are being answered when the server is told to stop."""
READING_SECONDS = 30
"""How long a client may leave its answer unread. A swap waits longer for requests, so that such a
client does not defer it."""
MAX_OTHERS = 256
"""Connections beside those of `max_queue` requests."""
LAST_ANSWER_SECONDS = 1
"""For what is still being answered after that."""
DRAIN_POLL_SECONDS = 0.05
SIGNAL_SECONDS = 1.0


class _Server(Server):
    """Goes on accepting connections until what is being answered has ended, so that `/health` can
    say meanwhile that no request should come here."""

    is_serving = False
    is_told_to_stop = False

    def __init__(self, config: uvicorn.Config, admission: Admission) -> None:
        super().__init__(config)
        self._admission = admission

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self.is_serving = True
        try:
            await super().serve(sockets)
        finally:
            self.is_serving = False

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._admission.is_stopping = True
        try:
            async with asyncio.timeout(SHUTDOWN_SECONDS):
                while self.server_state.tasks and not self.force_exit:
                    await asyncio.sleep(DRAIN_POLL_SECONDS)
        except TimeoutError:
            pass
        await super().shutdown(sockets)


def serve(app: FastAPI, settings: ServingSettings) -> None:
    """Serve until SIGINT or SIGTERM. Raises ServingError: PortBusy, or what is wrong with a folder
    that was to be served.

    The socket listens before the application looks for a pending release. So a job that leaves one
    and then finds the port refused knows that the next server to start will see it; one that gets
    through has its swap request answered when the start is over.
    """
    with bind(settings) as listener:
        host, port = listener.getsockname()[:2]
        print(f"serving on http://{host}:{port}", flush=True)
        server = _Server(
            http_config(
                app,
                shutdown_seconds=LAST_ANSWER_SECONDS,
                # Others than those that are answered or wait: health checks, and idle clients.
                limits=Limits(
                    max_connections=settings.max_queue + MAX_OTHERS,
                    reading_seconds=READING_SECONDS,
                ),
                # Entered here and not by uvicorn, which would answer an error with a traceback.
                lifespan="off",
            ),
            app.state.admission,
        )
        with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
            try:
                runner.run(_serve(app, settings, server, listener))
            except asyncio.CancelledError:
                # What SIGTERM does to a program that does not handle it: whoever sent it can tell.
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                signal.raise_signal(signal.SIGTERM)


async def _serve(
    app: FastAPI, settings: ServingSettings, server: _Server, listener: socket.socket
) -> None:
    task = asyncio.current_task()
    assert task is not None

    def stop() -> None:
        if server.is_serving:  # answers end first
            server.should_exit = server.is_told_to_stop = True
        elif not server.is_told_to_stop:  # uvicorn raises again what it saw
            task.cancel()

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop)
    async with app.router.lifespan_context(app):
        admission = app.state.admission
        live = admission.live
        if live is None:
            answers = str(admission.unserved or "nothing yet, the first release will")
        else:
            in_place = f" in place of {live.stands_in_for.id}" if live.stands_in_for else ""
            answers = f"{live.id} from {live.folder}{in_place}"
        engine = choose_engine(settings.engine)
        why = f" ({engine.reason})" if settings.engine == "auto" else ""
        print(f"engine {engine.name}{why}; answers: {answers}", flush=True)
        # What is loaded by now, torch above all, lives as long as the process. To look through it
        # for garbage takes some 0.1 s, in which no stream gets a token.
        gc.collect()
        gc.freeze()
        await server.serve(sockets=[listener])
        if server.is_told_to_stop:
            task.cancel()
        await asyncio.sleep(SIGNAL_SECONDS)  # Ctrl-C cancels this task in the loop's next turn


def bind(settings: ServingSettings) -> socket.socket:
    """A listening socket. Raises PortBusy, or ServingError for an address that must not be used."""
    has_key = settings.api_key is not None or settings.api_key_file is not None
    if not has_key and not _is_loopback(settings.host):
        raise ServingError(
            f"{settings.host} is reachable from other machines; set [serving] api_key or "
            "api_key_file, or listen on 127.0.0.1"
        )
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # With the protocol left at 0, asyncio does not take the connections for TCP and leaves out
    # TCP_NODELAY: 40 ms more for each answer.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((settings.host, settings.port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        if isinstance(error, socket.gaierror):
            raise ServingError(f"{settings.host} is no address to listen on: {error}") from None
        if error.errno == errno.EADDRINUSE:
            raise PortBusy(settings.host, settings.port) from None
        raise ServingError(f"cannot listen on {settings.host}:{settings.port}: {error}") from None
    return listener


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
