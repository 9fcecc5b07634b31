"""Puts the hub together: one ASGI app for git, the API, and the deliverer behind them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Collection
from functools import partial
from pathlib import Path

from sqlalchemy import text
from sqlalchemy.exc import OperationalError
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from jobs.store import JobStore
from pipeline.hub import (
    access,
    account_routes,
    activity_routes,
    auth,
    card_routes,
    commit_routes,
    content_routes,
    discussion_routes,
    git_http,
    http_json,
    lfs_routes,
    listing_routes,
    maintenance_routes,
    pages,
    ref_routes,
    repository_routes,
    retention,
    space_routes,
    token_routes,
    token_store,
    transfer_routes,
    webhook_routes,
    xet_routes,
)
from pipeline.hub.background import every
from pipeline.hub.database import check_schema, open_database
from pipeline.hub.deliveries import Deliverer
from pipeline.hub.errors import HubError, RepositoryMoved, RequestError
from pipeline.hub.events import EventLog
from pipeline.hub.git_http import GitHttp
from pipeline.hub.job_copies import JobLauncher
from pipeline.hub.maintenance import release_all_unneeded
from pipeline.hub.metrics import HubMetrics
from pipeline.hub.names import RepositoryName, segments
from pipeline.hub.reconcile import reconcile, reconcile_at_start
from pipeline.hub.repositories import Repositories
from pipeline.hub.repository_paths import RepositoryPath, api_path, file_path_of, type_of
from pipeline.hub.service import Hub, Remarks, hub_of
from pipeline.hub.settings import HubSettings
from pipeline.hub.signatures import AccessTokens, SignedUrls
from pipeline.hub.state_folder import database_path, only_hub_in
from pipeline.hub.webhook_store import SecretCipher
from serving.http.bodies import BodiesInFlight

_TELEMETRY = "/v1/telemetry"
"""Where `hf_xet` says how long its uploads took. Nobody here wants to know."""

# The registry of agents is what the client fetches before it has read a token.
_OPEN_PATHS = frozenset({"/health", "/live", "/api/agent-harnesses", _TELEMETRY})

PRUNE_SECONDS = 3600.0

_READ = {
    "revision": content_routes.describe,
    "tree": content_routes.tree,
    "commits": content_routes.commits,
    "discussions": discussion_routes.read,
    "secrets": space_routes.show,
    "variables": space_routes.show,
    "xet-write-token": xet_routes.write_token,
    "xet-read-token": xet_routes.refuse_reading,
}
_POST = {
    "paths-info": content_routes.paths_info,
    "branch": ref_routes.create_branch,
    "tag": ref_routes.create_tag,
    "super-squash": ref_routes.super_squash,
    "preupload": commit_routes.preupload,
    "commit": commit_routes.commit,
    "discussions": discussion_routes.change,
    "secrets": space_routes.put,
    "variables": space_routes.put,
}
_DELETE = {
    "branch": ref_routes.delete_branch,
    "tag": ref_routes.delete_tag,
    "secrets": space_routes.remove,
    "variables": space_routes.remove,
}
_BY_METHOD = {"GET": _READ, "HEAD": _READ, "POST": _POST, "DELETE": _DELETE}
_VERBS = frozenset({"refs", "settings", "auth-check"}).union(*_BY_METHOD.values())


def create_app(
    settings: HubSettings,
    root: Path,
    *,
    token: str,
    secret_key: bytes,
    jobs_store: JobStore | None = None,
    needed_commits: Callable[[], Collection[str]] | None = None,
    remarks_on: Remarks = lambda repository, changes: (),
) -> ASGIApp:
    """The hub whose state is in the folder `root`, which only one hub may use at a time.

    `token` is what every client must show, unless it is a job of `jobs_store` and shows the token
    of its attempt; `secret_key` is a Fernet key for the webhooks' secrets and those tokens.
    Webhooks that start jobs start them in `jobs_store`; without one there can be none. Commits that
    left every branch are kept as long as `needed_commits` or an event names them; without it, for
    ever. `remarks_on` makes the lines that git prints after a push.
    Raises HubError where the folder is in use or of a newer hub; so does the lifespan, which is
    what opens it.
    """
    if not token:
        raise HubError("The hub needs a token: without one anybody could push.")
    cipher = SecretCipher(secret_key)
    launcher = None if jobs_store is None else JobLauncher(jobs_store, secret_key)
    # Asked here too: a server shows a traceback for what its lifespan raises.
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
                deliver_job_commits=settings.deliver_job_commits,
                wake=deliverer.wake,
            )
            repositories = Repositories(root.absolute())
            guard = auth.Guard(
                token,
                settings.owner,
                jobs_store,
                secret_key,
                find_token=partial(token_store.identity_of_token, database, user=settings.owner),
                public_host=settings.host if settings.public_reads else None,
            )
            prune = partial(
                run_in_threadpool,
                retention.prune,
                database,
                keep_days=settings.keep_deliveries_days,
            )
            await prune()
            reconcile_at_start(repositories, log)
            deliverer.start()
            background = [
                asyncio.create_task(task)
                for task in (
                    every(
                        settings.reconcile_seconds,
                        partial(reconcile, repositories, log),
                        "look for refs that moved",
                    ),
                    every(PRUNE_SECONDS, prune, "remove old deliveries"),
                    every(
                        PRUNE_SECONDS,
                        partial(release_all_unneeded, repositories, database, needed_commits),
                        "stop keeping commits that nothing needs",
                    ),
                )
            ]
            app.state.hub = transfers.state.hub = Hub(
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
                remarks_on=remarks_on,
            )
            app.state.git = GitHttp(
                settings, guard, repositories, database, log, metrics, remarks_on
            )
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
            *account_routes.routes(),
            *card_routes.routes(),
            *listing_routes.routes(),
            *repository_routes.routes(),
            *webhook_routes.routes(),
            *activity_routes.routes(),
            *maintenance_routes.routes(),
            *token_routes.routes(),
            *pages.routes(),
            Route("/api/{rest:anytext}", repository_api, methods=["GET", "POST", "PUT", "DELETE"]),
            Route("/{rest:anytext}", repository_files, methods=["GET", "POST"]),
        ],
        exception_handlers=http_json.EXCEPTION_HANDLERS,
        lifespan=lifespan,
    )
    api.state.bodies = BodiesInFlight(http_json.MAX_BODY_BYTES)

    # These routes ask for a proof of their own in place of the token.
    transfers = Starlette(
        routes=[*transfer_routes.routes(), *xet_routes.routes()],
        exception_handlers=http_json.EXCEPTION_HANDLERS,
    )
    transfers.state.bodies = api.state.bodies

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            send = http_json.with_request_id(scope, send)
            if (git_request := git_http.match(scope)) is not None:
                await api.state.git(git_request, scope, receive, send)
                return
            if scope["path"].startswith((transfer_routes.PREFIX, xet_routes.PREFIX)):
                await transfers(scope, receive, send)
                return
            if scope["path"] not in _OPEN_PATHS:
                try:
                    identity = await api.state.guard.check(scope)
                    auth.check_site(scope)
                    await access.check(api.state.hub, identity, scope, _VERBS)
                except RequestError as error:
                    refusal = lfs_routes.refusal_by_guard(scope, error)
                    await (refusal or http_json.error_response(error))(scope, receive, send)
                    return
        await api(scope, receive, send)

    return app


async def health(request: Request) -> Response:
    return JSONResponse({"status": "ok"})


async def alive(request: Request) -> Response:
    """Answers once the database was read. An error is an answer too: a new start repairs no
    database."""
    hub = hub_of(request)

    def read() -> str | None:
        try:
            with hub.database.read() as connection:
                connection.execute(text("SELECT 1 FROM webhooks LIMIT 1"))
        except OperationalError as error:
            return str(error.orig)
        return None

    fault = await run_in_threadpool(read)
    return JSONResponse({"status": "ok", **({} if fault is None else {"database": fault})})


async def render_metrics(request: Request) -> Response:
    return Response(hub_of(request).metrics.render(), media_type="text/plain; version=0.0.4")


async def agent_harnesses(request: Request) -> Response:
    return JSONResponse({"standardEnvVars": [], "harnesses": {}})


async def repository_api(request: Request) -> Response:
    """`/api/<type>s`, and `/api/<type>s/[<owner>/]<name>[/<verb>/…]`."""
    hub = hub_of(request)
    parts = segments(request.scope["raw_path"])
    type = type_of(parts[1] if len(parts) > 1 else "")
    if type is None:
        raise HTTPException(404)
    if len(parts) == 2 and request.method in ("GET", "HEAD"):
        return await listing_routes.list_repositories(request, hub, type)
    path = await run_in_threadpool(
        api_path, request.scope["raw_path"], _VERBS, hub.settings.owner, hub.is_there
    )
    verb, *arguments = path.rest or ("",)
    try:
        return await _repository_call(request, hub, path.name, verb, arguments)
    except RepositoryMoved as moved:
        return _redirect(request, path, moved)


async def _repository_call(
    request: Request, hub: Hub, name: RepositoryName, verb: str, arguments: list[str]
) -> Response:
    method = request.method
    if verb == "xet-write-token":  # a GET, but what it gives is used to write
        auth.identity_of(request).require_write(f"{method} {request.url.path}")
    if verb == "" and method in ("GET", "HEAD"):
        return await content_routes.describe(request, hub, name, [])
    if verb == "refs" and method in ("GET", "HEAD"):
        return await ref_routes.list_refs(request, hub, name)
    if verb == "settings" and method == "PUT":
        return await repository_routes.change_settings(request, hub, name)
    if verb == "auth-check" and method == "GET":
        if arguments:
            auth.identity_of(request).require_write("what auth-check asks about")
        await run_in_threadpool(hub.find, name)
        return JSONResponse({})
    handler = _BY_METHOD.get(method, {}).get(verb)
    if handler is None:
        raise HTTPException(404)
    return await handler(request, hub, name, arguments)


async def repository_files(request: Request) -> Response:
    """`[<type>s/][<owner>/]<name>/resolve/<revision>/<path>`, and where git-lfs asks."""
    hub = hub_of(request)
    path = await run_in_threadpool(
        file_path_of, request.scope["raw_path"], hub.settings.owner, hub.is_there
    )
    if path is None:
        raise HTTPException(404)
    verb, *arguments = path.rest or ("",)
    try:
        if verb in ("resolve", "raw") and arguments and request.method in ("GET", "HEAD"):
            read = content_routes.resolve if verb == "resolve" else content_routes.raw
            return await read(request, hub, path.name, arguments[0], arguments[1:])
        if verb == "info" and arguments[:1] == ["lfs"]:
            return await lfs_routes.answer(request, hub, path.name, arguments[1:])
    except RepositoryMoved as moved:
        return _redirect(request, path, moved)
    raise HTTPException(404)


def _redirect(request: Request, path: RepositoryPath, moved: RepositoryMoved) -> Response:
    """The client repeats the same request there, method and body included."""
    query = request.scope["query_string"].decode("latin-1")
    location = path.at(moved.id) + (f"?{query}" if query else "")
    answer = http_json.error_response(moved)
    answer.status_code = 307
    # Within this hub, so it holds under whatever name the client called the hub.
    answer.headers["Location"] = location
    return answer
