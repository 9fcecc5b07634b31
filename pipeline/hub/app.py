"""Builds the hub: one ASGI app that answers git and API requests and sends webhooks' deliveries."""

import asyncio
import contextlib
import logging
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from functools import partial
from pathlib import Path

from sqlalchemy import text
from sqlalchemy.exc import DatabaseError
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jobs.store import JobStore
from pipeline.hub import http_json, unsupported
from pipeline.hub.database import check_schema, open_database
from pipeline.hub.discussions.store import open_bases
from pipeline.hub.errors import HubError, NotSupported, RequestError, Unauthorized
from pipeline.hub.events.log import EventLog
from pipeline.hub.events.reconcile import reconcile, reconcile_at_start
from pipeline.hub.git.backend import header
from pipeline.hub.large_files.signatures import AccessTokens, SignedUrls
from pipeline.hub.metrics import HubMetrics
from pipeline.hub.repositories.refs import RefChange
from pipeline.hub.repositories.store import Repositories, Repository
from pipeline.hub.routes import access, dispatch, git_http, lfs, login, transfers, xet
from pipeline.hub.routes.dispatch import VERBS
from pipeline.hub.routes.git_http import GitHttp
from pipeline.hub.service import Hub, Remarks, hub_of
from pipeline.hub.settings import HubSettings
from pipeline.hub.state_folder import database_path, only_hub_in
from pipeline.hub.tokens import auth
from pipeline.hub.tokens.store import identity_of_token
from pipeline.hub.webhooks import outbox
from pipeline.hub.webhooks.deliveries import Deliverer
from pipeline.hub.webhooks.job_copies import JobLauncher
from pipeline.hub.webhooks.store import SecretCipher
from serving.http.bodies import BodiesInFlight

logger = logging.getLogger(__name__)

_TELEMETRY = "/v1/telemetry"
"""`hf_xet` reports here how long its uploads took. The hub does not use the reports: it answers
404."""

# The paths that need no token. `huggingface_hub` asks for the list of coding agents
# (`agent-harnesses`) before it has read its token.
_OPEN_PATHS = frozenset({"/health", "/live", "/api/agent-harnesses", _TELEMETRY})

# The hub sends a client's request id back only if it is visible ASCII and has at most 200 bytes.
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,200}")

PRUNE_SECONDS = 3600.0


def create_app(
    settings: HubSettings,
    root: Path,
    *,
    token: str,
    secret_key: bytes,
    jobs_store: JobStore | None = None,
    needed_commits: Callable[[], Collection[str]] | None = None,
    remarks_on: Remarks = lambda *_: (),
) -> ASGIApp:
    """The hub whose state is in the folder `root`, which only one hub may use at a time.

    `token` is the hub's own token, which may do everything. The hub also accepts the tokens that
    were created with its own token, and the token of each running job of `jobs_store`.
    `secret_key` is a Fernet key: it encrypts the webhooks' secrets and signs the jobs' tokens. If
    there is a `jobs_store`, a webhook can start a job instead of calling a URL.

    `needed_commits` returns the commits that releases and jobs need. A garbage collection removes
    the commits that are on no branch any more, and that neither `needed_commits` nor a stored event
    names. If `needed_commits` is None, it removes none. `remarks_on` makes the lines that git shows
    the pusher after a push.

    Raises HubError if another hub uses the folder or if a newer hub wrote it. The app's lifespan
    opens the folder when the server starts, and raises the same errors.
    """
    if not token:
        raise HubError(
            "The hub's own token is empty, and with an empty token anybody could push: give the "
            "hub a token."
        )
    cipher = SecretCipher(secret_key)
    browser_login = login.BrowserLogin(secret_key)
    launcher = None if jobs_store is None else JobLauncher(jobs_store, secret_key)
    # The lifespan makes the same checks. They are also made here, because the server shows an
    # error of the lifespan as a traceback. An error that is raised here is shown as one line.
    with only_hub_in(root):
        check_schema(database_path(root))

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        with only_hub_in(root):
            database = open_database(database_path(root))
            metrics = HubMetrics()
            deliverer = Deliverer(database, settings, cipher, metrics, launcher)
            log = EventLog(
                database=database,
                hub_url=settings.url,
                metrics=metrics,
                wake=deliverer.wake,
            )
            repositories = Repositories(root.absolute())
            guard = auth.Guard(
                token,
                settings.owner,
                jobs_store,
                secret_key,
                find_token=partial(identity_of_token, database, user=settings.owner),
                public_host=settings.host if settings.public_reads else None,
            )
            prune = partial(
                run_in_threadpool,
                outbox.prune,
                database,
                keep_days=settings.keep_deliveries_days,
            )
            await prune()
            reconcile_at_start(repositories, log)
            deliverer.start()
            background = [
                asyncio.create_task(task)
                for task in (
                    _every(
                        settings.reconcile_seconds,
                        partial(reconcile, repositories, log),
                        "look for refs that moved",
                    ),
                    _every(PRUNE_SECONDS, prune, "remove old deliveries"),
                )
            ]

            def remarks(repository: Repository, changes: Sequence[RefChange]) -> Sequence[str]:
                with database.read() as connection:
                    bases = open_bases(connection, repository)
                return remarks_on(repository, bases, changes)

            app.state.hub = signed.state.hub = Hub(
                settings=settings,
                database=database,
                repositories=repositories,
                log=log,
                cipher=cipher,
                launcher=launcher,
                metrics=metrics,
                signed_urls=SignedUrls(secret_key),
                xet_tokens=AccessTokens(secret_key),
                needed_commits=needed_commits,
                remarks_on=remarks,
            )
            app.state.git = GitHttp(settings, guard, repositories, database, log, metrics, remarks)
            app.state.guard = guard
            try:
                yield
            finally:
                for task in background:
                    task.cancel()
                await asyncio.gather(*background, return_exceptions=True)
                await deliverer.stop()
                database.close()

    api = Starlette(
        routes=[
            Route("/health", health),
            Route("/live", alive),
            Route("/metrics", render_metrics),
            Route("/api/agent-harnesses", agent_harnesses),
            browser_login.route(),
            *dispatch.routes(),
        ],
        exception_handlers=http_json.EXCEPTION_HANDLERS,
        lifespan=lifespan,
    )
    api.state.bodies = BodiesInFlight(http_json.MAX_BODY_BYTES)

    # These routes do not check the tokens of the hub. They check a signed URL or a Xet access
    # token (`large_files/signatures.py`).
    signed = Starlette(
        routes=[*transfers.routes(), *xet.routes()],
        exception_handlers=http_json.EXCEPTION_HANDLERS,
    )
    signed.state.bodies = api.state.bodies

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            send = _with_request_id(scope, send)
            if (git_request := git_http.match(scope)) is not None:
                await api.state.git(git_request, scope, receive, send)
                return
            if scope["path"].startswith((transfers.PREFIX, xet.PREFIX)):
                await signed(scope, receive, send)
                return
            if scope["path"] not in _OPEN_PATHS and not login.is_login(scope):
                sent, scope = scope, browser_login.with_token(scope)
                try:
                    identity = await api.state.guard.check(scope)
                    auth.check_site(scope)
                    await access.check(api.state.hub, identity, scope, VERBS)
                except RequestError as error:
                    refusal = lfs.refusal_by_guard(scope, error) or login.form_instead(sent, error)
                    if refusal is None:
                        refusal = http_json.error_response(_missing(scope, error) or error)
                    await refusal(scope, receive, send)
                    return
        await api(scope, receive, send)

    return app


def _with_request_id(scope: Scope, send: Send) -> Send:
    """A `send` that adds the header `X-Request-Id` to the answer. The header has the client's id,
    or a new id if the client sent none or an id that `_REQUEST_ID` does not match."""
    given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
    id = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(8).encode()

    async def send_with_id(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], (b"x-request-id", id)]}
        await send(message)

    return send_with_id


def _missing(scope: Scope, error: RequestError) -> NotSupported | None:
    """The error for a feature that this hub does not have, if `error` only says that the request
    needs a token, and if clients never send one with such a request. Otherwise None. With a token,
    the request would be refused too."""
    if type(error) is not Unauthorized or header(scope, b"authorization"):
        return None
    if not scope["path"].startswith(unsupported.ASKED_WITHOUT_TOKEN):
        return None
    return unsupported.refusal(scope["method"], scope["path"])


async def _every(seconds: float, act: Callable[[], Awaitable[object]], name: str) -> None:
    """Waits `seconds`, calls `act`, and repeats both until the task is cancelled. `name` says what
    `act` does: if `act` fails, the log has "cannot <name>"."""
    while True:
        await asyncio.sleep(seconds)
        try:
            await act()
        except Exception:
            # The usual causes are a full disk and a locked database, so the next call may succeed.
            logger.exception("cannot %s; trying again in %g s", name, seconds)


async def health(request: Request) -> Response:
    return JSONResponse({"status": "ok"})


async def alive(request: Request) -> Response:
    """Says whether the hub can read its database. If it cannot, the answer has the error under
    `database`. The status is 200 even then, because a restart would not repair the database."""
    hub = hub_of(request)

    def read() -> str | None:
        try:
            with hub.database.read() as connection:
                connection.execute(text("SELECT 1 FROM webhooks LIMIT 1"))
        except DatabaseError as error:
            return str(error.orig)
        return None

    fault = await run_in_threadpool(read)
    return JSONResponse({"status": "ok", **({} if fault is None else {"database": fault})})


async def render_metrics(request: Request) -> Response:
    return Response(hub_of(request).metrics.render(), media_type="text/plain; version=0.0.4")


async def agent_harnesses(request: Request) -> Response:
    return JSONResponse({"standardEnvVars": [], "harnesses": {}})
