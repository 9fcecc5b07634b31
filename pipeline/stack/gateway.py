"""The gateway: one address for the completion servers of several pipelines.

The field `model` of a request chooses the pipeline. The gateway passes the request on to the server
of this pipeline, and the answer back, piece by piece as it arrives. It changes neither. The server
checks API keys and hosts: the gateway also passes these headers on.
"""

import asyncio
from collections.abc import Iterable, Mapping
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import Any

import httpx
from pydantic_core import from_json
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Message, Send

from serving.answer import WhileConnected
from serving.http.server import LimitedBodies
from serving.request_errors import RequestError

ASK_SECONDS = 5.0
"""How long the gateway waits for the answer of a server to its own questions, such as `/health`."""
_OF_ONE_CONNECTION = frozenset((b"connection", b"keep-alive", b"transfer-encoding", b"upgrade"))
"""Headers that are about one connection, and so are not passed on."""
_OF_EACH_SERVER = frozenset((b"date", b"server"))
"""Headers that the gateway's own HTTP server adds to each answer."""


def create_app(servers: Mapping[str, str], *, max_body_bytes: int) -> Starlette:
    """`servers`: the name of each pipeline, and the URL of its server."""
    gateway = _Gateway(servers)

    async def on_error(_request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if not isinstance(error, RequestError):  # a body that is too large
            error = RequestError(error.status_code, error.detail, headers=error.headers)
        return error.response()

    @asynccontextmanager
    async def lifespan(_: Starlette) -> Any:
        async with gateway.client:
            yield

    methods = ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
    return Starlette(
        routes=[
            Route("/live", gateway.live),
            Route("/health", gateway.health),
            Route("/metrics", gateway.metrics),
            Route("/v1/models", gateway.models),
            Route("/v1/models/{model:path}", gateway.forward),
            Route("/{path:path}", gateway.forward, methods=methods),
        ],
        middleware=[Middleware(LimitedBodies, max_body_bytes=max_body_bytes)],
        exception_handlers={HTTPException: on_error},
        lifespan=lifespan,
    )


class _Gateway:
    def __init__(self, servers: Mapping[str, str]) -> None:
        self._servers = servers
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        # Only a connection must be quick: during a swap, an answer may take long to begin.
        timeout = httpx.Timeout(None, connect=ASK_SECONDS)
        self.client = httpx.AsyncClient(timeout=timeout, limits=limits, trust_env=False)

    async def live(self, _request: Request) -> Response:
        """Whether the gateway works, whatever the servers do. `pipeline up` asks this."""
        return JSONResponse({"status": "ok"})

    async def health(self, request: Request) -> Response:
        """Clients should send requests here if a pipeline has a release. The answer has what the
        server of each pipeline says."""
        answers = await self._ask_all(request, "/health")
        said = {
            name: {"status": "down"} if answer is None else answer.json()
            for name, answer in answers.items()
        }
        num_ready = sum(answer is not None and answer.is_success for answer in answers.values())
        status = "ok" if num_ready == len(said) else "partly" if num_ready else "waiting"
        return JSONResponse({"status": status, "pipelines": said}, 200 if num_ready else 503)

    async def metrics(self, _request: Request) -> Response:
        raise RequestError(404, "each server has its own /metrics; `pipeline status` has addresses")

    async def models(self, request: Request) -> Response:
        """The models of all servers that answer."""
        listed = (await self._ask_models(request)).values()
        data = [model for models in listed for model in models or ()]
        return JSONResponse({"object": "list", "data": data})

    async def forward(self, request: Request) -> Response:
        body = await request.body()
        model = request.path_params.get("model")
        if request.method == "POST":
            model = await asyncio.to_thread(_model_of, body)
        elif model is None:  # such as `/docs`, which all servers answer alike
            model = next(iter(self._servers))
        server = await self._server_of(request, model)
        return WhileConnected(partial(self._exchange, server, request, body))

    async def _exchange(self, server: str, request: Request, body: bytes, send: Send) -> None:
        """Send the request to a server, and the server's answer to the client."""
        path = request.scope.get("raw_path") or request.url.path.encode()
        query = request.scope["query_string"]
        target = f"{server}{path.decode()}" + (f"?{query.decode()}" if query else "")
        headers = _passed_on(request.headers.raw)
        asked = httpx.Request(request.method, target, headers=headers, content=body)
        try:
            answer = await self.client.send(asked, stream=True)
        except httpx.TransportError:
            await _unreachable([server]).response()(request.scope, request.receive, send)
            return
        async with aclosing(answer):
            start: Message = {"type": "http.response.start", "status": answer.status_code}
            headers = _passed_on(answer.headers.raw)
            await send(
                {**start, "headers": [each for each in headers if each[0] not in _OF_EACH_SERVER]}
            )
            async for chunk in answer.aiter_raw():
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b""})

    async def _server_of(self, request: Request, model: str | None) -> str:
        """The URL of the server for `model`, the name of a pipeline or the id of a served release.
        Raises RequestError if there is none."""
        if model is not None and model in self._servers:
            return self._servers[model]
        # A client that may not send requests here gets the server's refusal, and no names.
        listed = await self._ask_models(request)
        names = ", ".join(self._servers)
        if model is None:
            raise RequestError(
                400,
                f"several pipelines answer here, so `model` must name one of them: {names}",
                param="model",
                code="model_missing",
            )
        for name, models in listed.items():
            if any(served["release"] == model for served in models or ()):
                return self._servers[name]
        if None in listed.values():
            raise _unreachable([name for name, models in listed.items() if models is None])
        raise RequestError(
            404,
            f"The model {model[:200]!r} does not exist; here are: {names}",
            param="model",
            code="model_not_found",
        )

    async def _ask_models(self, request: Request) -> dict[str, list[dict[str, Any]] | None]:
        """What each server lists at `/v1/models`; None if it cannot be reached, or has no room."""
        answers = await self._ask_all(request, "/v1/models")
        return {
            name: answer.json()["data"] if answer is not None and answer.is_success else None
            for name, answer in answers.items()
        }

    async def _ask_all(self, request: Request, path: str) -> dict[str, httpx.Response | None]:
        """The answer of each server to `GET path`; None if the server cannot be reached. Raises
        RequestError if the servers refuse this client."""

        names = (b"authorization", b"host")
        headers = [each for each in request.headers.raw if each[0] in names]

        async def ask(server: str) -> httpx.Response | None:
            asked = httpx.Request("GET", f"{server}{path}", headers=headers)
            try:
                async with asyncio.timeout(ASK_SECONDS):
                    return await self.client.send(asked)
            except (httpx.TransportError, TimeoutError):
                return None

        answers = await asyncio.gather(*map(ask, self._servers.values()))
        for answer in answers:
            if answer is not None and answer.status_code in (401, 403):
                refusal = answer.json()["error"]
                kind = {"type": refusal["type"], "code": refusal["code"]}
                raise RequestError(answer.status_code, refusal["message"], **kind)
        return dict(zip(self._servers, answers, strict=True))


def _passed_on(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    lower = ((name.lower(), value) for name, value in headers)
    return [each for each in lower if each[0] not in _OF_ONE_CONNECTION]


def _model_of(body: bytes) -> str | None:
    """The field `model` of the body; None if there is none. Raises RequestError."""
    try:
        content = from_json(body)
    except ValueError as error:
        raise RequestError(400, f"The body is not JSON: {error}") from None
    model = content.get("model") if isinstance(content, dict) else None
    return model if isinstance(model, str) else None


def _unreachable(servers: Iterable[str]) -> RequestError:
    return RequestError(
        503,
        f"no answer from {', '.join(servers)}; `pipeline status` shows whether it is up",
        type="server_error",
        code="unreachable",
        headers={"Retry-After": "1"},
    )
