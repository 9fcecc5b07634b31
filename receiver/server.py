"""The names that a receiver script imports.

A script decorates its functions with `webhook_endpoint`, which creates one server for all of them.
A script that needs its own server uses `WebhooksServer` instead. A function calls `launch_job` if
its work must not be lost.
"""

import hashlib
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from receiver import autostart
from receiver.errors import NoJobStore
from receiver.guard import HANDLED
from receiver.payload import WebhookPayload
from receiver.settings import state_dir
from receiver.verify import ProofScheme
from receiver.webhooks_server import WebhooksServer

if TYPE_CHECKING:
    from jobs.store import JobStore

__all__ = ["WebhookPayload", "WebhooksServer", "launch_job", "webhook_endpoint"]


def webhook_endpoint(
    path: Callable[..., Any] | str | None = None,
    *,
    webhook_secret: str | Sequence[str] | None = None,
    proof: ProofScheme | None = None,
) -> Any:
    """Register the decorated function on the server that all functions of a script share. The
    parameters have the same meaning as in `WebhooksServer.add_webhook`.

    If the function is defined in the script's folder or in a folder below it, the server starts
    when the script ends. In all other cases, for example in a notebook, the user must call the
    method `launch` of a decorated function. `launch` takes the arguments of
    `WebhooksServer.launch`. If a notebook cell is executed again, its function replaces the earlier
    function of the same name.
    """
    if callable(path):
        return webhook_endpoint()(path)

    def register(handler: Any) -> Any:
        server = _shared_server()
        if autostart.is_interactive():
            for route, earlier in list(server.registered_webhooks.items()):
                if _is_redefined(earlier.handler, handler):
                    server.remove_webhook(route)
        server.add_webhook(path, webhook_secret=webhook_secret, proof=proof)(handler)
        if _is_of_the_script(handler):
            _autostart_at_end_of_script()

        def launch(*args: Any, **kwargs: Any) -> str:
            _cancel_autostart()
            return server.launch(*args, **kwargs)

        handler.launch = launch
        return handler

    return register


_autostart_canceller: Callable[[], None] | None = None


@cache
def _shared_server() -> WebhooksServer:
    return WebhooksServer()


def _is_of_the_script(handler: Callable[..., Any]) -> bool:
    """Whether the handler is defined in the main script's folder or in a folder below it.

    If the handler is defined elsewhere, the main script is a program that only imports the handler,
    such as a test runner. When this program ends, no server may start.
    """
    script = getattr(sys.modules["__main__"], "__file__", None)
    module = getattr(sys.modules[handler.__module__], "__file__", None)
    if script is None or module is None:
        return False
    return Path(module).resolve().is_relative_to(Path(script).resolve().parent)


def _autostart_at_end_of_script() -> None:
    global _autostart_canceller
    if _autostart_canceller is None:
        _autostart_canceller = autostart.at_end_of_script(_shared_server().launch)


def _cancel_autostart() -> None:
    if _autostart_canceller is not None:
        _autostart_canceller()


def _is_redefined(earlier: Callable[..., Any], now: Callable[..., Any]) -> bool:
    return (earlier.__module__, earlier.__qualname__) == (now.__module__, now.__qualname__)


def launch_job(
    command: Sequence[str],
    payload: WebhookPayload | Mapping[str, Any],
    *,
    store: str | Path | None = None,
) -> str:
    """Submit a job that runs `command`, and return the id of the job.

    When this function returns, the job is on disk. The stack's runner starts it now or, if no stack
    is up, at the next `pipeline up`. The command finds `payload` in its environment variable
    `WEBHOOK_PAYLOAD`. If the sender repeats the delivery that is being handled, the same call
    returns the same job, unless this job has failed or was cancelled.

    Args:
        command: The program and its arguments. The job runs in a folder of its own, so use absolute
            paths.
        store: The URL or the file of the job store. Default: `$PIPELINE_JOBS__DATABASE_URL`, or the
            file in the state folder of the project.

    Raises:
        NoJobStore: There is no such file, because no stack was ever up there.
        StoreError: The store failed. The handler should let this error pass: the sender then gets
            an error, and repeats the delivery.
    """
    from jobs.job import Delivery
    from jobs.spec import JobSpec

    given = store or os.environ.get("PIPELINE_JOBS__DATABASE_URL")
    where = str(given or state_dir() / "jobs" / "jobs.sqlite")
    if "://" not in where and not Path(where).exists():
        raise NoJobStore(
            f"There is no job store {where}: start the stack once (`pipeline up`), run this"
            ' program in its project or after `eval "$(pipeline env)"`, or pass `store`.'
        )
    if isinstance(payload, WebhookPayload):
        payload = payload.model_dump(mode="json", exclude_unset=True)
    delivery = None
    if (handled := HANDLED.get()) is not None:
        path, id = handled
        # A handler may launch several jobs for one delivery, so the source names the command too.
        digest = hashlib.sha256(json.dumps(list(command)).encode()).hexdigest()
        delivery = Delivery(source=f"{path} {digest}", id=id)
    spec = JobSpec(command=tuple(command))
    return _opened(where).submit(spec, payload=dict(payload), delivery=delivery).id


@cache
def _opened(where: str) -> "JobStore":
    from jobs.store import JobStore

    return JobStore.open(where)
