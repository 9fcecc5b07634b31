"""Lists the services of a stack: the hub, the completion servers, the runner and the receiver. Each
service is a process that runs a `pipeline` command. Each except the runner answers requests on a
port of its own."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import httpx

from pipeline.errors import PipelineError
from pipeline.paths import Home
from pipeline.probes import port_fault
from pipeline.settings import Settings

START_SECONDS = 60.0
"""A service may need this long to import its modules, open its database and listen."""


@dataclass(frozen=True, kw_only=True)
class Service:
    name: str
    arguments: tuple[str, ...]
    """The arguments after `pipeline` on the command line."""
    url: str | None = None
    """Where the service answers; None for the runner."""
    pipeline: str | None = None
    """The pipeline that a completion server serves; None for any other service."""
    metrics_port: int | None = None
    """The port of the runner's metrics; None if it serves none, and for any other service."""
    port_setting: str | None = None
    """Text for the user: where to set another port."""
    start_seconds: float = START_SECONDS
    """The service must answer within this time after its start. If it does not, `pipeline up` ends
    with an error; a stack that is already up kills the service and starts it again."""

    @property
    def port(self) -> int | None:
        return None if self.url is None else httpx.URL(self.url).port or 80


def services_of(settings: Settings) -> tuple[Service, ...]:
    """Every service that `pipeline up` starts, in the order in which it starts them.

    `pipeline down` stops them in reverse order. The receiver ends first, so that no new event comes
    in. The hub ends last, so that a running job can still read from the hub.

    Raises PipelineError if two services have the same port. Also raises it if a port is 0, which
    would let the operating system choose a port: the services could then not find each other.
    """
    for table, port in (("serving", settings.serving.port), ("receiver", settings.receiver.port)):
        if port == 0:
            raise PipelineError(
                f"port = 0 under [{table}]: the services of a stack find each other by their "
                "ports; set a port from 1 to 65535"
            )
    servers = tuple(
        Service(
            name="serve" if len(settings.pipelines) == 1 else f"serve-{pipeline.name}",
            arguments=("serve", "--pipeline", pipeline.name),
            url=settings.server_url(pipeline),
            pipeline=pipeline.name,
            port_setting=_setting("serving")
            if pipeline.port is None
            else f"`port` of {pipeline.name} under [[pipelines]]",
            start_seconds=START_SECONDS + settings.serving.start_seconds,
        )
        for pipeline in settings.pipelines
    )
    services = (
        hub_service(settings),
        *servers,
        replace(RUNNER, metrics_port=settings.jobs.metrics_port or None),
        Service(
            name="receiver",
            arguments=("receiver",),
            url=settings.receiver_url,
            port_setting=_setting("receiver"),
        ),
    )
    _check_ports_differ(services, settings.jobs.metrics_port)
    return services


def hub_service(settings: Settings) -> Service:
    return Service(
        name="hub", arguments=("hub",), url=settings.hub_url, port_setting=_setting("hub")
    )


RUNNER = Service(name="runner", arguments=("jobs", "runner"))


def _check_ports_differ(services: Sequence[Service], metrics_port: int) -> None:
    takers: dict[int, str] = {metrics_port: "metrics_port under [jobs]"} if metrics_port else {}
    for service in services:
        if service.port is None:
            continue
        if service.port in takers:
            raise PipelineError(
                f"port {service.port} is set for both {takers[service.port]} and the "
                f"{_in_words(service)}; change one of the two, for example with "
                f"{service.port_setting}"
            )
        takers[service.port] = f"the {_in_words(service)}"


def _in_words(service: Service) -> str:
    return "completion server" if service.arguments[0] == "serve" else service.name


def _setting(table: str) -> str:
    return f"PIPELINE_{table.upper()}__PORT=…, or `port` under [{table}]"


def check_port(service: Service) -> None:
    """Raise PipelineError if another program uses the service's port."""
    if service.url is not None and (fault := port_fault(service.url)) is not None:
        raise PipelineError(
            f"port {service.port} for the {_in_words(service)} cannot be used ({fault}); "
            f"free the port, or set another port for the {_in_words(service)}: "
            f"{service.port_setting}"
        )


def deliveries_path(settings: Settings, home: Home) -> Path:
    """The file in which the stack's receiver stores deliveries for durable handlers."""
    if "deliveries_path" in settings.receiver.model_fields_set:
        return settings.receiver.deliveries_path
    return home.root / "receiver.db"
