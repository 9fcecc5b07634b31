"""Lists the services of a stack: the hub, the completion servers, the gateway if there are several
of them, the runner and the receiver. Each service is a process that runs a `pipeline` command. Each
service except the runner answers requests on its own port.

Also finds out whether a service answers, and whether a child process of the stack (a service that
`pipeline up` started) works or hangs. For each child, a thread asks again and again whether the
child works. Each of these questions is called a probe.
"""

import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import httpx

from pipeline.errors import PipelineError
from pipeline.settings import Settings

START_SECONDS = 60.0
"""A service may need this long to import its modules, open its database and listen."""
Answer = Literal["works", "silent", "dead", "unknown"]
"""What a probe found out. `works`: the child answered. `silent`: the child gave no answer. `dead`:
the child answered that it cannot work any more and must be restarted. `unknown`: the child may
work, but has no way to answer."""
LivenessProbe = Callable[[float], Answer]
"""A function that asks the child once. It waits for the child's answer for at most the given number
of seconds."""

PROBE_INTERVAL_SECONDS = 5.0
"""The longest time from one probe to the next, and the longest time that a probe waits for its
answer."""
MIN_PROBES_PER_HANG = 6
"""A child counts as hung after `hang_seconds` without an answer. If `hang_seconds` is short, the
interval between probes gets shorter, so that the child gets at least this many probes within
`hang_seconds`."""


@dataclass(frozen=True, kw_only=True)
class Service:
    name: str
    arguments: tuple[str, ...]
    """The arguments after `pipeline` on the command line."""
    url: str | None = None
    """The address at which the service answers; None for the runner."""
    pipeline: str | None = None
    """The pipeline whose releases a completion server serves; None for any other service."""
    port_setting: str | None = None
    """Where the user can set another port for the service, as a text for error messages."""
    start_seconds: float = START_SECONDS
    """How long the service may take from its start to its first answer. If the service takes longer
    while `pipeline up` starts the stack, `pipeline up` ends with an error. If it takes longer after
    a restart, the stack kills the service and starts it again."""

    @property
    def port(self) -> int | None:
        return None if self.url is None else httpx.URL(self.url).port or 80


def services_of(settings: Settings) -> tuple[Service, ...]:
    """Every service of the stack, in the order in which `pipeline up` starts the services.

    `pipeline down` stops the services in reverse order. The receiver ends first, so that no new
    event starts a job. The hub ends last, so that a running job can still read from the hub.

    Raises PipelineError if two services have the same port, or if the port of the completion server
    or of the receiver is 0: the operating system would choose the port, and the other services
    could not find it.
    """
    for table, port in (("serving", settings.serving.port), ("receiver", settings.receiver.port)):
        if port == 0:
            raise PipelineError(f"port = 0 under [{table}]: the services need a port; set one")
    servers = []
    for pipeline in settings.pipelines:
        name = "serve" if len(settings.pipelines) == 1 else f"serve-{pipeline.name}"
        server = replace(
            _service(name, settings.server_url(pipeline), "serving"),
            arguments=("serve", "--pipeline", pipeline.name),
            pipeline=pipeline.name,
            start_seconds=START_SECONDS + settings.serving.start_seconds,
        )
        if pipeline.port is not None:
            setting = f"`port` of {pipeline.name} under [[pipelines]]"
            server = replace(server, port_setting=setting)
        servers.append(server)
    gateway_url = settings.gateway_url
    services = (
        hub_service(settings),
        *servers,
        *([_service("gateway", gateway_url, "serving")] if gateway_url else []),
        RUNNER,
        _service("receiver", settings.receiver_url, "receiver"),
    )
    _check_ports_differ(services)
    return services


def choose(names: str | None, services: Sequence[Service]) -> Sequence[Service]:
    """The services of these names, which commas divide; all for None. Raises PipelineError."""
    if names is None:
        return services
    known = [service.name for service in services]
    if unknown := sorted(set(names.split(",")).difference(known)):
        raise PipelineError(
            f"--only {','.join(unknown)}: there is no such service; choose from {', '.join(known)}"
        )
    return [service for service in services if service.name in names.split(",")]


def hub_service(settings: Settings) -> Service:
    return _service("hub", settings.hub_url, "hub")


def _service(name: str, url: str, table: str) -> Service:
    setting = f"PIPELINE_{table.upper()}__PORT=…, or `port` under [{table}]"
    return Service(name=name, arguments=(name,), url=url, port_setting=setting)


RUNNER = Service(name="runner", arguments=("runner",))


def _check_ports_differ(services: Sequence[Service]) -> None:
    users: dict[int, str] = {}
    for service in services:
        if service.port is None:
            continue
        if service.port in users:
            raise PipelineError(
                f"port {service.port} is set for both the {users[service.port]} and the "
                f"{_describe(service)}; change one of the two: {service.port_setting}"
            )
        users[service.port] = _describe(service)


def _describe(service: Service) -> str:
    if service.arguments[0] != "serve":
        return service.name
    return "completion server" + (f" of {service.pipeline}" if service.name != "serve" else "")


def check_port(service: Service) -> None:
    """Raise PipelineError if the service cannot listen on its port, for example because another
    program uses this port."""
    if service.url is None:
        return
    address = httpx.URL(service.url)
    with socket.socket(socket.AF_INET6 if ":" in address.host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address.host, service.port))
        except OSError as error:
            raise PipelineError(
                f"port {service.port} for the {_describe(service)} cannot be used "
                f"({error.strerror or error}); stop the program that uses it, or set another port: "
                f"{service.port_setting}"
            ) from error


class ChildWatch:
    """Watches one child process until `stop` is called.

    Until its first answer, the child may be silent for `start_seconds`. After its first answer, it
    may be silent for `hang_seconds`.

    The planned time between two probes is called the interval. If a probe gets no answer, the time
    from this probe to the next probe is added to the child's silent time, but at most two intervals
    are added. Without this limit, a pause of our own process, for example while the machine sleeps,
    would count as silence of the child, and the child would be killed.
    """

    def __init__(self, probe: LivenessProbe, *, start_seconds: float, hang_seconds: float) -> None:
        self._probe = probe
        self._start_seconds = start_seconds
        self._hang_seconds = hang_seconds
        self._interval = min(PROBE_INTERVAL_SECONDS, hang_seconds / MIN_PROBES_PER_HANG)
        self._has_answered = False
        self._is_dead = False
        self._silent_seconds = 0.0
        self._stop = threading.Event()
        threading.Thread(target=self._watch, name="child-watch", daemon=True).start()

    @property
    def has_stopped_answering(self) -> bool:
        """True if the child has answered in the past, but has now been silent for two intervals or
        longer."""
        return self._has_answered and self._silent_seconds >= 2 * self._interval

    @property
    def kill_reason(self) -> str | None:
        """Why the child must be killed; None if it need not be killed."""
        if self._is_dead:
            return "it answered that it must be restarted"
        limit = self._hang_seconds if self._has_answered else self._start_seconds
        return f"it did not answer for {limit:g} s" if self._silent_seconds >= limit else None

    def stop(self) -> None:
        self._stop.set()

    def _watch(self) -> None:
        while not self._stop.is_set():
            began = time.monotonic()
            answer = self._probe(self._interval)
            self._is_dead = answer == "dead"
            if answer in ("works", "unknown"):
                self._has_answered |= answer == "works"
                self._silent_seconds = 0.0
            self._stop.wait(max(0.0, self._interval - (time.monotonic() - began)))
            if answer == "silent":
                self._silent_seconds += min(time.monotonic() - began, 2 * self._interval)


def http_probe(url: str) -> LivenessProbe:
    """The probe for a service that has a port. It sends `GET /live`. The status 503 means `dead`,
    and any other status means `works`."""

    def probe(seconds: float) -> Answer:
        response = _get(f"{url}/live", seconds)
        if response is None:
            return "silent"
        return "dead" if response.status_code == 503 else "works"

    return probe


def file_probe(file: Path) -> LivenessProbe:
    """The probe for a service that has no port, but touches `file` again and again while it works.

    The answer is `works` if the file's modification time has changed since the last probe. If the
    time has not changed, or if the file does not exist, the probe tries to touch the file itself.
    If this succeeds, the answer is `silent`. If it fails, for example because the file system is
    read-only, the service cannot touch the file either, and the answer is `unknown`.
    """

    def touched_at() -> int | None:
        try:
            return file.stat().st_mtime_ns
        except OSError:
            return None

    seen = touched_at()

    def probe(_: float) -> Answer:
        nonlocal seen
        before, seen = seen, touched_at()
        if seen is not None and seen != before:
            return "works"
        try:
            file.touch()
        except OSError:
            return "unknown"
        seen = touched_at()
        return "silent"

    return probe


def server_state(url: str) -> dict[str, Any]:
    """The answer of the completion server at `url` to `GET /health`. Empty if nothing answers, or
    if the answer is not a JSON object. If another program listens there and answers with a JSON
    object, returns this object."""
    response = health(url)
    try:
        answer = None if response is None else response.json()
    except ValueError:  # another program listens on the port
        return {}
    return answer if isinstance(answer, dict) else {}


def health(url: str) -> httpx.Response | None:
    """The service's answer to `GET /health`, whatever its status; None if no answer comes in 5 s.

    The status does not matter here: a completion server that serves no release answers 503,
    although the service is up.
    """
    return _get(f"{url}/health", 5)


def _get(url: str, seconds: float) -> httpx.Response | None:
    try:
        # These URLs are plain HTTP. `verify=False` saves time: otherwise httpx would load all
        # certificate authorities for each request.
        return httpx.get(url, timeout=seconds, trust_env=False, verify=False)
    except httpx.HTTPError:
        return None
