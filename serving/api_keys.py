"""Checks the bearer tokens of requests."""

import secrets

from fastapi import Request

from serving.errors import ServingError
from serving.request_errors import RequestError
from serving.settings import ServingSettings


def load_api_keys(settings: ServingSettings) -> tuple[str, ...]:
    """All API keys of the settings and of `api_key_file`. If this is empty, everyone may send
    requests.

    Raises ServingError if the file cannot be read. Also raises it if the file contains no key, or
    if the key of the settings is empty, because otherwise everyone would be let in.
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
    return tuple(keys)


def is_one_of(given: str, keys: tuple[str, ...]) -> bool:
    """Whether `given` is one of `keys`. Takes the same time for a right and a wrong key, so that
    the time tells an attacker nothing about the keys."""
    matches = [secrets.compare_digest(given.encode(), key.encode()) for key in keys]
    return any(matches)


def bearer_of(request: Request, name: str) -> str:
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


def check_api_key(request: Request, keys: tuple[str, ...]) -> None:
    """Raise RequestError 401 if the request has none of `keys`."""
    if not is_one_of(bearer_of(request, "an API key"), keys):
        raise wrong_token("an API key", status=401)


def wrong_token(name: str, *, status: int) -> RequestError:
    """The error for a wrong token. `name` says which token is needed, such as "an API key"."""
    return RequestError(
        status, f"the token is not {name}", type="authentication_error", code="invalid_token"
    )
