"""Lists the services of a stack: the hub, the completion servers, the gateway if there are several
of them, the runner and the receiver. Each service is a process that runs a `pipeline` command. Each
service except the runner answers requests on its own port."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import httpx

from pipeline.errors import PipelineError
from pipeline.liveness import port_fault
from pipeline.settings import Settings

START_SECONDS = 60.0
"""A service may need this long to import its modules, open its database and listen."""


@dataclass(frozen=True, kw_only=True)
class Service:
    name: str
    arguments: tuple[str, ...]
    """The arguments after `pipeline` on the command line."""
    url: str | None = None
    """The address at which the service answers; None for the runner."""
    pipeline: str | None = None
    """The pipeline whose releases a completion server serves; None for any other service."""
    metrics_port: int | None = None
    """The port on which the runner serves its metrics. None if the runner serves no metrics, and
    for any other service."""
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

    Raises PipelineError if two services have the same port, or if a service has the port of the
    runner's metrics. Also raises PipelineError if the port of the completion server or of the
    receiver is 0: the operating system would choose the port, and the other services could not find
    it.
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
        replace(RUNNER, metrics_port=settings.jobs.metrics_port or None),
        _service("receiver", settings.receiver_url, "receiver"),
    )
    _check_ports_differ(services, settings.jobs.metrics_port)
    return services


def hub_service(settings: Settings) -> Service:
    return _service("hub", settings.hub_url, "hub")


def _service(name: str, url: str, table: str) -> Service:
    setting = f"PIPELINE_{table.upper()}__PORT=…, or `port` under [{table}]"
    return Service(name=name, arguments=(name,), url=url, port_setting=setting)


RUNNER = Service(name="runner", arguments=("jobs", "runner"))


def _check_ports_differ(services: Sequence[Service], metrics_port: int) -> None:
    users: dict[int, str] = {metrics_port: "metrics_port under [jobs]"} if metrics_port else {}
    for service in services:
        if service.port is None:
            continue
        if service.port in users:
            raise PipelineError(
                f"port {service.port} is set for both {users[service.port]} and the "
                f"{_describe(service)}; change one of the two: {service.port_setting}"
            )
        users[service.port] = f"the {_describe(service)}"


def _describe(service: Service) -> str:
    return "completion server" if service.arguments[0] == "serve" else service.name


def check_port(service: Service) -> None:
    """Raise PipelineError if the service cannot listen on its port, for example because another
    program uses this port."""
    if service.url is not None and (fault := port_fault(service.url)) is not None:
        raise PipelineError(
            f"port {service.port} for the {_describe(service)} cannot be used ({fault}); set "
            f"another port for the {_describe(service)}: {service.port_setting}"
        )
