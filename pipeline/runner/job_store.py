"""Opens the job store (the database of all jobs), and checks whether this version of hotpush can
use the job store."""

from jobs.job import PREFIX, job_of_token
from jobs.store import JobStore
from pipeline.hub.database import check_database
from pipeline.paths import Home
from pipeline.settings import Settings
from pipeline.tokens import Tokens


def open_job_store(settings: Settings, home: Home) -> JobStore:
    """Open the store that `database_url` under `[jobs]` names. If this setting is missing, open the
    store in the state folder. Creates the tables if there are none. Raises StoreError."""
    if settings.jobs.database_url is not None:
        return JobStore.open(settings.jobs.database_url)
    home.jobs_dir.mkdir(parents=True, exist_ok=True)
    return JobStore.open(home.jobs_database)


NOWHERE = "sqlite://"
"""The location of a store that is only in memory. Use it only in the thread that opened it."""


def reading_jobs(settings: Settings, home: Home) -> JobStore:
    """Open the same store as `open_job_store`, but create no file: if there is none yet, this is an
    empty store that is NOWHERE. Raises StoreError."""
    if settings.jobs.database_url is None and not home.jobs_database.exists():
        return JobStore.open(NOWHERE)
    return open_job_store(settings, home)


def is_token_of_running_job(
    token: str, settings: Settings, home: Home, tokens: Tokens, *, pipeline: str
) -> bool:
    """Whether `token` belongs to a running job of this pipeline. Raises StoreError."""
    if not token.startswith(PREFIX):
        return False
    with reading_jobs(settings, home) as store:
        job = job_of_token(token, store, tokens.key.encode())
    return job is not None and job.spec.pipeline == pipeline


def check_schemas(settings: Settings, home: Home, *, is_hub_here: bool = True) -> None:
    """Raise StoreError if another version of hotpush wrote the hub's database or the job store, and
    HubError if the hub that runs here has lost its repositories.

    Call this before any service starts. A service creates its database when it starts. Without this
    check, the stack might create one database before it finds that the other one cannot be used.
    """
    check_database(home.hub_dir, settings.hub.database, is_hub_here=is_hub_here)
    reading_jobs(settings, home).close()
