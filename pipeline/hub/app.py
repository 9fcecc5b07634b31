"""Builds and serves the hub: one ASGI app that answers git and API requests and sends webhooks'
deliveries."""

import asyncio
import contextlib
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType

import anyio.to_thread
from fastapi import APIRouter, Depends, FastAPI
from prometheus_client import generate_latest
from sqlalchemy import text
from sqlalchemy.exc import DatabaseError
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp

from jobs.job import running_job
from jobs.store import JobStore
from pipeline.hub import http_json
from pipeline.hub.database import check_database, open_database
from pipeline.hub.deliveries import Deliverer, HubMetrics
from pipeline.hub.errors import HubError, NotFound, NotSupported, RepositoryNotFound
from pipeline.hub.events import EventLog, create_repository, owner_id, reconcile, reconcile_at_start
from pipeline.hub.http_json import Json
from pipeline.hub.releases import Releases, sync_releases
from pipeline.hub.repositories import Repositories
from pipeline.hub.routes import (
    administration,
    attempts,
    commits,
    contents,
    discussions,
    followers,
    git_http,
    jobs,
    large_files,
    repositories,
    webhooks,
)
from pipeline.hub.schedules import keep_schedules
from pipeline.hub.service import (
    Elsewhere,
    Hub,
    HubOf,
    NeededCommits,
    Remarks,
    Who,
    by_encoded_path,
    identified,
    only_hub_in,
)
from pipeline.hub.settings import HubSettings
from pipeline.hub.webhooks import prune
from receiver import listen
from serving.http.server import BodiesInFlight, Server

logger = logging.getLogger(__name__)

NUM_THREADS = 100
"""How many requests may wait for git or the database at once."""
SHUTDOWN_SECONDS = 10
"""How long the hub waits for unfinished requests when it is told to stop."""


def create_app(
    settings: HubSettings,
    root: Path,
    *,
    token: str,
    secret_key: bytes,
    jobs_store: JobStore,
    jobs_dir: Path,
    needed_commits: NeededCommits,
    remarks_on: Remarks = lambda *_: (),
    elsewhere: Elsewhere | None = None,
    datasets: Iterable[str] = (),
    pipeline_dirs: Mapping[str, Path] = MappingProxyType({}),
    console: APIRouter | None = None,
) -> ASGIApp:
    """The hub whose state is in the folder `root`, which only one hub may use at a time.

    `token` is the hub's own token, which may do everything. The hub also accepts the tokens that
    were created with its own token, and the token of each running job of `jobs_store`, to which
    clients, webhooks and schedules submit jobs. The folders of these jobs are in `jobs_dir`, from
    which the hub sends their logs; `elsewhere` is for jobs on other machines. `secret_key` is a
    Fernet key: it encrypts the secrets of webhooks and jobs, and signs the jobs' tokens.

    `needed_commits` returns the commits that releases and jobs need. A garbage collection removes
    the commits that are on no branch any more, and that neither `needed_commits` nor a stored event
    names. `remarks_on` makes the lines that git shows the pusher after a push. `datasets` are
    created if they do not exist, without a first commit, so that a first `git push` needs no pull.
    `pipeline_dirs` are the folders of the pipelines' releases, by the pipeline's name; each release
    is a revision of the model repository of this name. `console` has the pages for a person.

    Raises BadRequest if no dataset may have such a name, HubError if another hub uses the folder,
    or if its repositories are not there, and StoreError if the database cannot be used, or if
    another version wrote it. The app's lifespan opens both when the server starts, and raises the
    same errors.
    """
    if not token:
        raise HubError(
            "The hub's own token is empty, and with an empty token anybody could push: give the "
            "hub a token."
        )
    followed = [repositories.new_name("dataset", *each.split("/")) for each in datasets]
    # The lifespan makes the same checks. They are also made here, because the server shows an
    # error of the lifespan as a traceback. An error that is raised here is shown as one line.
    with only_hub_in(root):
        check_database(root, settings.database)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        # Git's processes of files, lists and pushes may hold three times `max_git_processes`.
        anyio.to_thread.current_default_thread_limiter().total_tokens = NUM_THREADS
        with only_hub_in(root):
            database = open_database(root, settings.database)
            metrics = HubMetrics()
            deliverer = Deliverer(database, settings, secret_key, metrics, jobs_store)
            log = EventLog(database=database, hub_url=settings.url)
            repositories = Repositories(root.absolute(), database)
            await reconcile_at_start(repositories, log)
            for name in followed:
                try:
                    repositories.find(name)
                except RepositoryNotFound:
                    create_repository(repositories, log, name, author=None)
            releases = Releases(
                repositories=repositories,
                log=log,
                owner=settings.owner,
                pipeline_dirs=pipeline_dirs,
                running_job=partial(running_job, jobs_store),
            )
            upkeep = _keep_up(settings, releases)
            schedule = keep_schedules(database, jobs_store)
            tasks = [asyncio.create_task(each) for each in (deliverer.run(), upkeep, schedule)]
            app.state.hub = Hub(
                settings=settings,
                database=database,
                repositories=repositories,
                log=log,
                metrics=metrics,
                token=token,
                jobs_store=jobs_store,
                jobs_dir=jobs_dir,
                elsewhere=elsewhere or Elsewhere(),
                secret_key=secret_key,
                needed_commits=needed_commits,
                remarks_on=remarks_on,
                releases=releases,
                git_slots=defaultdict(lambda: asyncio.Semaphore(settings.max_git_processes)),
            )
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                database.close()

    api = FastAPI(
        openapi_url=None,
        redirect_slashes=False,
        exception_handlers=http_json.EXCEPTION_HANDLERS,
        lifespan=lifespan,
    )
    api.state.bodies = BodiesInFlight(http_json.MAX_BODY_BYTES)
    # These routes do not check the tokens of the hub, or check them by themselves: the probes, the
    # pages with their sessions, the check of a README, a grant in a URL or as an access token of
    # Xet, and the calls of agents.
    api.include_router(probes)
    if console is not None:
        api.include_router(console)
    for open_router in (commits.checks, large_files.transfers, large_files.xet, attempts.router):
        api.include_router(open_router)
    # The first route that matches a path answers it. So what is no repository comes first, and the
    # description of a repository, whose path has only the name, comes last.
    for router in (
        *(contents.lists, administration.router, webhooks.router, jobs.router),
        commits.router,
        *(repositories.router, discussions.router, large_files.router, git_http.router),
        *(followers.router, contents.api, contents.files, others),
    ):
        api.include_router(router, dependencies=[Depends(identified)])

    return by_encoded_path(api)


def serve(app: ASGIApp, settings: HubSettings) -> None:
    """Serve until SIGINT or SIGTERM. Raises AddressUnavailable if the port is in use."""
    listening = listen.bind(
        settings.host,
        settings.port,
        how_to_set_address=(
            "`host` and `port` under [hub] in pipeline.toml, or PIPELINE_HUB__HOST and "
            "PIPELINE_HUB__PORT"
        ),
    )
    print(f"hub on {settings.url}", flush=True)
    listen.serve(Server(app, shutdown_seconds=SHUTDOWN_SECONDS), listening)


async def _keep_up(settings: HubSettings, releases: Releases) -> None:
    """Again and again, looks for releases that came or went and for refs that moved, and removes
    old deliveries."""
    repositories, log = releases.repositories, releases.log
    while True:
        await sync_releases(releases)
        await asyncio.sleep(settings.reconcile_seconds)
        # After an error, the next time may succeed: the usual causes are a full disk and a locked
        # database.
        try:
            await reconcile(repositories, log)
        except Exception:
            logger.exception("cannot look for refs that moved")
        try:
            await run_in_threadpool(prune, log.database, settings.keep_deliveries_days)
        except Exception:
            logger.exception("cannot remove old deliveries")


probes = APIRouter()


@probes.get("/health")
@probes.get("/live")
def alive(hub: HubOf) -> Json:
    """Says whether the hub can read its database. If it cannot, the answer has the error under
    `database`. The status is 200 even then, because a restart would not repair the database."""
    try:
        with hub.database.read() as connection:
            connection.execute(text("SELECT 1 FROM webhooks LIMIT 1"))
    except DatabaseError as error:
        return {"status": "ok", "database": str(error.orig)}
    return {"status": "ok"}


others = APIRouter()


@others.get("/api/whoami-v2")
async def whoami(identity: Who) -> Json:
    token = {"displayName": identity.token_name, "role": identity.role}
    return {
        "type": "user",
        "id": owner_id(identity.user),
        "name": identity.user,
        "fullname": identity.user,
        "orgs": [],
        "auth": {"type": "access_token", "accessToken": token},
    }


@others.get("/metrics")
async def render_metrics(hub: HubOf) -> Response:
    return PlainTextResponse(
        generate_latest(hub.metrics.registry), headers={"Content-Type": "text/plain; version=0.0.4"}
    )


@others.api_route(
    "/{rest:rest}",
    methods=["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"],
)
async def refuse(request: Request) -> None:
    """Refuses what this hub does not have. Below `/api/`, the status is 501: after 404, a client of
    the Hugging Face Hub would report that a job, a file or a repository is missing, and after most
    other errors of a server, it would repeat the request."""
    path = request.url.path
    message = f"{request.method} {path} is not supported by this hub."
    raise NotSupported(message) if path.startswith("/api/") else NotFound(message)
