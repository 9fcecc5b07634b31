"""What a stack is made of: the commands of hub, servers, runner and receiver, and their ports."""

import socket
from collections.abc import Sequence
from dataclasses import dataclass

import httpx

from pipeline.errors import PipelineError
from pipeline.settings import Settings


@dataclass(frozen=True, kw_only=True)
class Service:
    name: str
    arguments: tuple[str, ...]
    """Of the `pipeline` command."""
    url: str | None = None
    port_setting: str | None = None
    """How it gets another port."""


def services_of(settings: Settings) -> tuple[Service, ...]:
    """Everything that `pipeline up` runs.

    It is stopped in reverse order: the receiver first, so that nothing new comes in, and the hub
    last, so that a job can still read from it. Raises PipelineError for a port that only a service
    on its own can have, because the others could not find it, and for one that two are to have.
    """
    for table, port in (("serving", settings.serving.port), ("receiver", settings.receiver.port)):
        if port == 0:
            raise PipelineError(
                f"port = 0 under [{table}]: the parts of a stack find each other by their ports; "
                "give it one from 1 to 65535"
            )
    servers = tuple(
        Service(
            name="serve" if len(settings.pipelines) == 1 else f"serve-{pipeline.name}",
            arguments=("serve", "--pipeline", pipeline.name),
            url=settings.server_url(pipeline),
            port_setting=_setting("serving")
            if pipeline.port is None
            else f"`port` of {pipeline.name} under [[pipelines]]",
        )
        for pipeline in settings.pipelines
    )
    services = (
        hub_service(settings),
        *servers,
        RUNNER,
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
        if service.url is None:
            continue
        port = httpx.URL(service.url).port or 80
        if port in takers:
            raise PipelineError(
                f"port {port} is both {takers[port]} and that of the {_in_words(service)}; move "
                f"one of them, as with {service.port_setting}"
            )
        takers[port] = f"that of the {_in_words(service)}"


def _in_words(service: Service) -> str:
    return "completion server" if service.arguments[0] == "serve" else service.name


def _setting(table: str) -> str:
    return f"PIPELINE_{table.upper()}__PORT=…, or `port` under [{table}]"


def check_port(service: Service) -> None:
    """Raise PipelineError where another program listens already."""
    if service.url is None:
        return
    url = httpx.URL(service.url)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((url.host, url.port or 80))
        except OSError as error:
            raise PipelineError(
                f"port {url.port} for the {_in_words(service)} cannot be used ({error.strerror}); "
                f"free it, or move the {_in_words(service)}: {service.port_setting}"
            ) from None
