"""A client that costs little: on two cores a slow one would be what is measured.

It writes requests as they stand on the wire over connections that stay open, and reads answers that
have a `Content-Length`.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

Request = Callable[[int], bytes]
"""The body and headers of the n-th request, as `post_request` makes them."""


@dataclass(frozen=True, kw_only=True)
class Load:
    per_second: float
    """Answered."""
    seconds: list[float]
    """That each answer took from when its request was due."""


def post_request(url: str, body: bytes, headers: dict[str, str]) -> bytes:
    parts = urlsplit(url)
    lines = [
        f"POST {parts.path} HTTP/1.1",
        f"Host: {parts.netloc}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        *(f"{name}: {value}" for name, value in headers.items()),
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body


async def load(
    url: str, request: Request, *, clients: int, seconds: float, per_second: float | None = None
) -> Load:
    """Post for so long; without `per_second`, each client as soon as it was answered.

    Raises RuntimeError for an answer that is no success.
    """
    parts = urlsplit(url)
    taken: list[float] = []
    number = 0
    began = time.perf_counter()

    async def client() -> None:
        nonlocal number
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        try:
            while True:
                mine, number = number, number + 1
                due = began + mine / per_second if per_second else time.perf_counter()
                if due - began > seconds:
                    return
                if (early := due - time.perf_counter()) > 0:
                    await asyncio.sleep(early)
                writer.write(request(mine))
                await _answer(reader)
                taken.append(time.perf_counter() - due)
        finally:
            writer.close()

    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(client())
    return Load(per_second=len(taken) / (time.perf_counter() - began), seconds=taken)


async def _answer(reader: asyncio.StreamReader) -> None:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    status, *lines = head.split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines if line)
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    if not status.split()[1].startswith("2"):
        raise RuntimeError(f"{status}: {body.decode(errors='replace')[:300]}")
