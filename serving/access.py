"""Decides which requests are let in: checks bearer tokens, and refuses requests to other hosts if
the server has no API key."""

import secrets
from collections.abc import Awaitable, Callable

from fastapi import Request
from fastapi.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from serving.errors import ServingError
from serving.http.cross_site import other_host
from serving.request_errors import RequestError
from serving.settings import ServingSettings


def load_api_keys(settings: ServingSettings) -> tuple[str, ...]:
    """All API keys of the settings and of `api_key_file`. If this is empty, everyone may send
    requests.

    Raises ServingError if the file cannot be read, or if a key is one that no client can send. Also
    raises it if the file contains no key, or if the key of the settings is empty, because otherwise
    everyone would be let in.
    """
    keys = [settings.api_key.get_secret_value()] if settings.api_key is not None else []
    if keys and not keys[0].strip():
        raise ServingError("api_key: the key is empty; set a key, or remove the setting")
    if settings.api_key_file is not None:
        try:
            text = settings.api_key_file.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ServingError(f"{settings.api_key_file}: cannot be read: {error}") from None
        lines = (line.strip() for line in text.splitlines())
        found = [line for line in lines if line and not line.startswith("#")]
        if not found:
            raise ServingError(
                f"{settings.api_key_file}: the file contains no key; write one key per line"
            )
        keys += found
    for number, key in enumerate(keys, start=1):
        if key != key.strip() or not (key.isascii() and key.isprintable()):
            raise ServingError(
                f"API key number {number}: it begins or ends with a space or a newline, or has a "
                "character that is not ASCII; no client can send such a key: choose another one"
            )
    return tuple(keys)


async def check_api_key(request: Request, *, keys: tuple[str, ...]) -> None:
    """Raise RequestError 401 if there are keys and the request has none of them."""
    if keys and not _is_one_of(_bearer_of(request, "an API key"), keys):
        raise _wrong_token("an API key", status=401)


async def check_swap_token(
    request: Request, *, admin_token: str, job_may_swap: Callable[[str], bool]
) -> None:
    """Raise RequestError 401 if the request has no token, and 403 if its token is neither
    `admin_token` nor one for which `job_may_swap` returns true."""
    given = _bearer_of(request, "the admin token")
    if not _is_one_of(given, (admin_token,)) and not await run_in_threadpool(job_may_swap, given):
        raise _wrong_token("the admin token or the token of a running job", status=403)


def _is_one_of(given: str, keys: tuple[str, ...]) -> bool:
    """Whether `given` is one of `keys`. Takes the same time for a right and a wrong key, so that
    the time tells an attacker nothing about the keys."""
    matches = [secrets.compare_digest(given.encode(), key.encode()) for key in keys]
    return any(matches)


def _bearer_of(request: Request, name: str) -> str:
    """The bearer token of a request. Raises RequestError 401 if the request has none. `name` says
    in the error message which token is needed, such as "an API key"."""
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not given:
        raise RequestError(
            401,
            f"{name} is needed: Authorization: Bearer …",
            type="authentication_error",
            code="missing_token",
            headers={"WWW-Authenticate": "Bearer"},
        )
    return given.strip()


def _wrong_token(name: str, *, status: int) -> RequestError:
    """The error for a wrong token. `name` says which token is needed, such as "an API key"."""
    return RequestError(
        status, f"the token is not {name}", type="authentication_error", code="invalid_token"
    )


class RefuseOtherHosts:
    """Middleware that refuses requests over loopback whose header `Host` names another host, before
    any route sees them. A page of another site can make its own host name lead to this machine (DNS
    rebinding, `serving/http/cross_site.py`). Without this middleware, the page could then read the
    answers of a server without a key.

    Args:
        host: The address on which the server listens. It may be a name that leads to loopback.
        on_error: Returns the answer to a request that is refused.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        host: str,
        on_error: Callable[[Request, Exception], Awaitable[Response]],
    ) -> None:
        self._app = app
        self._names = {host.lower()}
        self._on_error = on_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            host = other_host(Headers(scope=scope), scope.get("server"), self._names)
            if host is not None:
                error = RequestError(
                    403,
                    f"{host!r} is not a name of this server: call 127.0.0.1 or localhost, or set "
                    "[serving] api_key",
                    type="permission_error",
                    code="wrong_host",
                )
                answer = await self._on_error(Request(scope), error)
                await answer(scope, receive, send)
                return
        await self._app(scope, receive, send)
