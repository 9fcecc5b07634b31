"""Finds out whether a port is free, and sends `GET /health` and `GET /live` to a service."""

import socket
from typing import Any

import httpx


def port_fault(url: str) -> str | None:
    """Why no service can listen on the host and port of `url`; None if a service can listen
    there."""
    address = httpx.URL(url)
    with socket.socket(socket.AF_INET6 if ":" in address.host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address.host, address.port or 80))
        except OSError as error:
            return error.strerror or str(error)
    return None


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


def liveness(url: str, seconds: float = 5) -> httpx.Response | None:
    """The service's answer to `GET /live`, whatever its status; None if no answer comes within
    `seconds`."""
    return _get(f"{url}/live", seconds)


def _get(url: str, seconds: float) -> httpx.Response | None:
    try:
        # These URLs are plain HTTP. `verify=False` saves time: otherwise httpx would load all
        # certificate authorities for each request.
        return httpx.get(url, timeout=seconds, trust_env=False, verify=False)
    except httpx.HTTPError:
        return None
