"""Provides a hub and a runner for a job that a person submits. If `pipeline up` or another
`pipeline jobs run` has already started services for this state folder, the job uses the hub and the
runner among these services. Otherwise `with_runner` starts a new hub and a new runner.
"""

import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType

from pipeline.paths import Home
from pipeline.runner.job_store import check_schemas, open_job_store
from pipeline.settings import Settings
from pipeline.stack.record import at_running_stack, read_stack
from pipeline.stack.services import RUNNER, Service, hub_service
from pipeline.stack.supervisor import Stack

logger = logging.getLogger(__name__)

CHECK_SECONDS = 0.2
SECONDS_AFTER_ERROR = 5.0
"""The pause before the next check of the services, if a check failed because of an unexpected
error."""


@contextmanager
def with_runner(home: Home, settings: Settings, *, detach: bool) -> Iterator[str]:
    """Provide a hub and a runner for one job. Yields the hub's URL.

    If a stack is up, the job uses the hub and the runner of the stack. Otherwise this function
    starts a runner, and a hub on a free port. When the `with` block ends, this function waits until
    no job is left, and then stops the hub and the runner. If the block ends with an error or
    Ctrl-C, this function stops them at once.

    If `detach` is set and no stack is up, this function starts only the hub. When the `with` block
    ends, the function stops the hub and starts a *detached runner*: a process in the background,
    which runs its own hub and ends when no job is left. After an error or Ctrl-C, it starts none.
    """
    if read_stack(home) is not None:
        # Read the hub's URL from the record of the running stack, not from the settings. If another
        # `pipeline jobs run` has started the hub, it has chosen a free port for the hub (see
        # below), and the settings do not have this port.
        yield at_running_stack(settings, home).hub_url
        return
    check_schemas(settings, home)
    port = _free_port()
    hub_settings = settings.hub.model_copy(update={"port": port})
    settings = settings.model_copy(update={"hub": hub_settings})
    variables = {"PIPELINE_HUB__PORT": str(port), "PIPELINE_JOBS__METRICS_PORT": "0"}
    hub = hub_service(settings)
    with running_services([hub] if detach else [hub, RUNNER], home, settings, variables):
        yield settings.hub_url
        if not detach:
            _wait_until_idle(home, settings)
    if detach:
        # Start the detached runner only now, when the `with` block has submitted the job. If the
        # runner started earlier, it might find no job and end at once.
        subprocess.Popen(
            [sys.executable, "-m", "pipeline", "runner", "--with-hub", "--until-idle"],
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            stdout=home.log_file("runner").open("ab"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


@contextmanager
def running_services(
    services: Sequence[Service],
    home: Home,
    settings: Settings,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[None]:
    """Start a stack of these services, and stop it when the `with` block ends. Until then, a thread
    restarts each child that has ended, and kills each child that hangs. The children also get the
    environment variables `variables`."""
    stack = Stack(home, services, hang_seconds=settings.stack.hang_seconds, variables=variables)
    stop = threading.Event()

    def check() -> None:
        wait = CHECK_SECONDS
        while not stop.wait(wait):
            try:
                for event in stack.check_services():
                    logger.warning("%s", event)
                wait = CHECK_SECONDS
            except Exception:
                # If the thread ended here, no child would be restarted any more.
                wait = SECONDS_AFTER_ERROR
                logger.exception("the services cannot be checked; trying again in %g s", wait)

    # On Linux, a child gets SIGTERM when the thread that started it ends (`die_with_parent`). The
    # thread `stack-check` restarts children. When it ends, the children that it has restarted get
    # SIGTERM. This does no harm, because `stack.stop` then sends SIGTERM to all children anyway.
    thread = threading.Thread(target=check, name="stack-check")
    try:
        stack.start()
        thread.start()
        yield
    finally:
        stop.set()
        if thread.is_alive():  # an error, or Ctrl-C, may have come before the thread was started
            thread.join()
        stack.stop()


def _wait_until_idle(home: Home, settings: Settings) -> None:
    """Wait until every job has ended, not only the job that was submitted in the `with` block: in
    the meantime, another `pipeline jobs run` may have submitted a second job to this runner."""
    with open_job_store(settings, home) as store:
        while store.has_open_jobs():
            time.sleep(0.1)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])
