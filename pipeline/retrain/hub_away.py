"""Recognises errors of the hub's client that mean: the hub cannot be reached, or is too busy to
answer."""

import httpx

OVERLOADED = (429, 502, 503, 504)
"""Status codes of a hub that is too busy or is starting. They are treated like a missing answer."""


def is_away(error: BaseException) -> bool:
    import httpx2  # the hub's client raises its errors
    from huggingface_hub.errors import HfHubHTTPError

    # The client may hide a failed connection as the cause of an error about missing files.
    return any(
        isinstance(each, (httpx.TransportError, httpx2.TransportError))
        or (isinstance(each, HfHubHTTPError) and each.response.status_code in OVERLOADED)
        for each in (error, error.__cause__)
    )
