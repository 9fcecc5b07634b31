"""Makes the HTTP answer with the bytes of a file, or with one range of them. The answer to HEAD has
only the headers."""

import re
from collections.abc import AsyncIterator, Mapping
from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from pipeline.hub.errors import RangeNotSatisfiable

_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")


class Read(Protocol):
    def __call__(self, *, start: int, length: int) -> AsyncIterator[bytes]: ...


def answer(
    request: Request, size: int, headers: Mapping[str, str], content: Read | bytes
) -> Response:
    """The answer with a file of `size` bytes: its `content`, or a function that gives it. Then the
    bytes are streamed, so only one chunk is in memory at a time. Raises RangeNotSatisfiable."""
    start, end = _requested_range(request, size)
    is_part = (start, end) != (0, size)
    status = 206 if is_part else 200
    headers = {
        "Accept-Ranges": "bytes",
        "Content-Type": "application/octet-stream",
        "X-Content-Type-Options": "nosniff",
        "Content-Length": str(end - start),
        **({"Content-Range": f"bytes {start}-{end - 1}/{size}"} if is_part else {}),
        **headers,
    }
    if request.method == "HEAD":
        return Response(status_code=status, headers=headers)
    if isinstance(content, bytes):
        return Response(content[start:end], status_code=status, headers=headers)
    body = content(start=start, length=end - start)
    return StreamingResponse(body, status_code=status, headers=headers)


def _requested_range(request: Request, size: int) -> tuple[int, int]:
    """The first byte of the requested range, and the byte after its last one. This is the complete
    file if the request has no header `Range`, or one that the hub does not understand, for example
    with several ranges."""
    text = request.headers.get("range")
    found = _RANGE.fullmatch(text) if text else None
    if found is None or not any(found.groups()):
        return 0, size
    first, last = found.groups()
    if first:
        start, end = int(first), min(int(last) + 1 if last else size, size)
    else:
        start, end = max(0, size - int(last)), size
    if start >= size or (last and first and int(last) < int(first)):
        raise RangeNotSatisfiable(
            f"The file has {size} bytes, and the range {text} is not in it: ask for another range.",
            headers={"Content-Range": f"bytes */{size}"},
        )
    return start, end
