"""Posts one delivery to a webhook's URL, with the headers of https://www.standardwebhooks.com and
of the Hugging Face Hub.

The host is resolved once per attempt, and the connection goes to exactly the address that was
checked. So it does not matter if the name gets another address after the check.
"""

import asyncio
import ssl
import time
from contextlib import aclosing
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import cache
from typing import Any

import httpx

from pipeline.hub.errors import HubError
from pipeline.hub.webhooks import outbox
from pipeline.hub.webhooks.addresses import Address, resolve
from pipeline.hub.webhooks.outbox import Attempt, Due
from receiver.verify import is_signing_secret, signer

MAX_RETRY_AFTER_SECONDS = 3600.0


class Refused(HubError):
    """The receiver is on this machine, and no program listens at its address."""


async def post(due: Due, url: str, secret: str | None, *, timeout_seconds: float) -> Attempt:
    """Posts the delivery. Does not raise an error of the receiver or the network. Such an error
    becomes the `error` of the attempt."""
    started_at, clock = time.time(), time.perf_counter()
    try:
        async with asyncio.timeout(timeout_seconds):
            ending = await _answer(due, httpx.URL(url), secret)
    except TimeoutError:
        ending = {"error": f"no answer within {timeout_seconds:g} s"}
    except (httpx.HTTPError, httpx.InvalidURL, HubError) as failure:
        error = str(failure) or type(failure).__name__
        ending = {"error": error, "refused": isinstance(failure, Refused)}
    milliseconds = 1000 * (time.perf_counter() - clock)
    return Attempt(started_at=started_at, milliseconds=milliseconds, **ending)


async def _answer(due: Due, target: httpx.URL, secret: str | None) -> dict[str, Any]:
    """The receiver's answer, as fields of an `Attempt`. Tries the addresses of the host in order,
    and posts the delivery to the first one that accepts a connection. Raises Refused and the errors
    of httpx."""
    port = target.port or (443 if target.scheme == "https" else 80)
    failures: list[httpx.ConnectError] = []
    is_refused = True
    # The URLs for httpx have the address, not the host's name. A client of its own for each
    # delivery keeps httpx from using an open connection again for another host at the same address,
    # whose certificate nobody has checked. `trust_env=False`: a proxy from the environment would
    # also get the requests to receivers on this machine.
    async with httpx.AsyncClient(verify=_certificates(), trust_env=False, timeout=None) as client:
        for address in await resolve(target.host, port):
            try:
                response = await client.send(
                    _request(client, target, address, due, secret), stream=True
                )
            except httpx.ConnectError as failure:
                failures.append(failure)
                is_refused = is_refused and address.is_loopback and _is_refusal(failure)
                continue
            async with aclosing(response):
                return {
                    "response_status": response.status_code,
                    "response_head": await _head(response),
                    "retry_after_seconds": _retry_after_seconds(
                        response.headers.get("retry-after")
                    ),
                }
    raise Refused(str(failures[-1])) if is_refused else failures[-1]


def _is_refusal(failure: httpx.ConnectError) -> bool:
    """Whether no program listens at the address. False if a program listens, and only the TLS
    handshake failed, for example because nobody trusts its certificate. httpx raises the same class
    of error in both cases."""
    cause: BaseException | None = failure
    while cause is not None and not isinstance(cause, ConnectionRefusedError):
        cause = cause.__cause__ or cause.__context__
    return cause is not None


@cache
def _certificates() -> ssl.SSLContext:
    return httpx.create_ssl_context()


def _request(
    client: httpx.AsyncClient, target: httpx.URL, address: Address, due: Due, secret: str | None
) -> httpx.Request:
    """The request. Its URL has the address; the host's name is in the Host header and in TLS."""
    is_private = target.scheme == "https" or address.is_loopback
    return client.build_request(
        "POST",
        target.copy_with(host=str(address)),
        content=due.payload.encode(),
        headers={"Host": target.netloc.decode("ascii"), **headers(due, secret, is_private)},
        extensions={"sni_hostname": target.raw_host.decode("ascii")},
    )


def headers(due: Due, secret: str | None, is_private: bool) -> dict[str, str]:
    """The headers of a delivery. `Webhook-Id` is the same in all retries and replays. Only a forced
    replay has a new id.

    The key of the signature is the base64 part of a secret `whsec_…`, or the bytes of any other
    secret. The header `X-Webhook-Secret` has the secret itself, as on the Hugging Face Hub, because
    a receiver may compare it. But a `whsec_` secret is made only for signing. It is left out if
    `is_private` is false, because somebody could then read it on its way.
    """
    now = datetime.now(UTC)
    found = {
        "Content-Type": "application/json",
        "User-Agent": "hotpush-hub",
        "Webhook-Id": due.id,
        "webhook-timestamp": str(int(now.timestamp())),
    }
    if due.replay_of is not None:
        found["Webhook-Replay-Of"] = due.replay_of
    if secret is not None:
        found["webhook-signature"] = signer(secret).sign(due.id, now, due.payload)
        if is_private or not is_signing_secret(secret):
            found["X-Webhook-Secret"] = secret
    return found


async def _head(response: httpx.Response) -> str:
    """The first `HEAD_CHARACTERS` characters of the answer. The rest is not read."""
    body = b""
    async for chunk in response.aiter_bytes():
        body += chunk
        if len(body) >= outbox.HEAD_CHARACTERS:
            break
    return body.decode(errors="replace")[: outbox.HEAD_CHARACTERS]


def _retry_after_seconds(value: str | None) -> float | None:
    """The seconds that the header `Retry-After` asks for, at most an hour. The header has a number
    of seconds or an HTTP date (RFC 9110, 10.2.3). None if it has neither."""
    if value is None:
        return None
    try:
        if value.isascii() and value.isdigit():
            seconds = float(value)
        else:
            seconds = (parsedate_to_datetime(value) - datetime.now(UTC)).total_seconds()
    except (ValueError, TypeError, OverflowError):
        return None
    return min(max(seconds, 0.0), MAX_RETRY_AFTER_SECONDS)
