"""Who may ask: bearer tokens."""

import secrets

from fastapi import Request

from serving.errors import ServingError
from serving.request_errors import RequestError
from serving.settings import ServingSettings


def load_api_keys(settings: ServingSettings) -> tuple[str, ...]:
    """All keys of the settings and of their file; none means that everyone may ask.

    Raises ServingError for a file that cannot be read or has no key: an empty one must not open the
    door.
    """
    keys = [settings.api_key.get_secret_value()] if settings.api_key is not None else []
    if settings.api_key_file is not None:
        try:
            text = settings.api_key_file.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ServingError(f"{settings.api_key_file}: cannot be read: {error}") from None
        lines = (line.strip() for line in text.splitlines())
        found = [line for line in lines if line and not line.startswith("#")]
        if not found:
            raise ServingError(f"{settings.api_key_file}: holds no key; write one per line")
        keys += found
    return tuple(keys)


def is_one_of(given: str, keys: tuple[str, ...]) -> bool:
    """In the same time for each key, right or wrong."""
    matches = [secrets.compare_digest(given.encode(), key.encode()) for key in keys]
    return any(matches)


def bearer_of(request: Request, name: str) -> str:
    """The bearer token of a request. Raises RequestError for a request without one; `name` says in
    the message what is needed."""
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
    """Raises RequestError for a request without one of `keys`."""
    if not is_one_of(bearer_of(request, "an API key"), keys):
        raise wrong_token("an API key", status=401)


def wrong_token(name: str, *, status: int) -> RequestError:
    return RequestError(status, f"not {name}", type="authentication_error", code="invalid_token")
