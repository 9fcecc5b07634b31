"""Runs the application on its port, from the start of the server to its end."""

import asyncio
import signal
import socket

from fastapi import FastAPI

from serving.engine_choice import choose_engine
from serving.errors import ServingError
from serving.http.listening import is_only_loopback, listening_socket
from serving.http.server import Limits, Server, freeze_imports, http_config
from serving.settings import ServingSettings

SHUTDOWN_SECONDS = 10
"""How long running requests may continue after the server was told to stop."""
READING_SECONDS = 30
"""How long a client may read nothing of its answer. By default a swap waits longer (`drain_seconds`
is 60), so such a client does not defer the swap."""
MAX_OTHERS = 256
"""How many connections may be open in addition to `max_queue`: for health checks and idle clients.
"""
SIGNAL_SECONDS = 1.0
"""How long the server waits for the cancellation that follows a Ctrl-C."""


def serve(app: FastAPI, settings: ServingSettings) -> None:
    """Serve until SIGINT or SIGTERM. Prints the address, then the engine and the release.

    Raises ServingError if `bind` does, and ReleaseError if the folder that should be served has
    faults.

    The socket listens before the application looks for a pending release, so that no release is
    forgotten. A job first marks its release as pending and then sends its swap request. If the
    connection is refused, the next server that starts finds the mark. If the connection succeeds,
    the server answers the request after its start.
    """
    with bind(settings) as listener:
        host, port = listener.getsockname()[:2]
        print(f"serving on http://{host}:{port}", flush=True)
        server = Server(
            http_config(
                app,
                shutdown_seconds=SHUTDOWN_SECONDS,
                limits=Limits(
                    max_connections=settings.max_queue + MAX_OTHERS,
                    reading_seconds=READING_SECONDS,
                ),
                # `_serve` runs the lifespan itself: uvicorn would print a traceback for an error.
                lifespan="off",
            )
        )
        with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
            try:
                runner.run(_serve(app, settings, server, listener))
            except asyncio.CancelledError:
                # End by SIGTERM, so that the parent process sees this signal in the exit status.
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                signal.raise_signal(signal.SIGTERM)


async def _serve(
    app: FastAPI, settings: ServingSettings, server: Server, listener: socket.socket
) -> None:
    task = asyncio.current_task()
    assert task is not None
    is_told_to_stop = False

    def stop() -> None:
        nonlocal is_told_to_stop
        if not server.started:
            # The server does not serve yet, so there is no request to wait for.
            task.cancel()
        # Let the server end its running requests. Then the task is cancelled below.
        server.should_exit = is_told_to_stop = True

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop)
    async with app.router.lifespan_context(app):
        admission = app.state.admission
        live = admission.live
        if live is None:
            answers = str(admission.unserved or "no requests until the first release is live")
        else:
            in_place = f" in place of {live.stands_in_for.id}" if live.stands_in_for else ""
            answers = f"{live.id} from {live.folder}{in_place}"
        engine = choose_engine(settings.engine)
        why = f" ({engine.reason})" if settings.engine == "auto" else ""
        print(f"engine {engine.name}{why}; answers: {answers}", flush=True)
        freeze_imports()
        await server.serve(sockets=[listener])
        if is_told_to_stop:
            task.cancel()
        # After SIGTERM, the cancellation above ends this wait. After Ctrl-C, the runner cancels
        # this task in the next turn of the event loop.
        await asyncio.sleep(SIGNAL_SECONDS)


def bind(settings: ServingSettings) -> socket.socket:
    """A listening socket for the address in the settings.

    Raises ServingError if the address cannot be used, for example because another program uses the
    port, or if other machines can reach it but no API key is set.
    """
    has_key = settings.api_key is not None or settings.api_key_file is not None
    try:
        if not has_key and not is_only_loopback(settings.host):
            raise ServingError(
                f"other machines can reach {settings.host}; set [serving] api_key or api_key_file, "
                "or listen on 127.0.0.1"
            )
        return listening_socket(settings.host, settings.port)
    except socket.gaierror as error:
        raise ServingError(f"no address was found for {settings.host}: {error}") from None
    except OSError as error:
        raise ServingError(
            f"cannot listen on {settings.host}:{settings.port} ({error.strerror}); choose another "
            "port with --port or [serving] port"
        ) from None
