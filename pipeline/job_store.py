"""Opens the job store of a state folder, and checks whether this release can use it."""

from collections.abc import Iterator
from contextlib import contextmanager

from jobs.attempt_tokens import PREFIX, job_of_token
from jobs.migrations import check_schema as check_jobs_schema
from jobs.schema import connect
from jobs.store import JobStore
from pipeline.hub.database import check_schema as check_hub_schema
from pipeline.paths import Home
from pipeline.settings import Settings
from pipeline.tokens import Tokens


def open_job_store(settings: Settings, home: Home) -> JobStore:
    """The store at `database_url`. Without that setting, the store in the state folder, which is
    created if it is missing. Raises StoreError."""
    if settings.jobs.database_url is not None:
        return JobStore.open(settings.jobs.database_url)
    home.jobs_dir.mkdir(parents=True, exist_ok=True)
    return JobStore.open(home.jobs_database)


@contextmanager
def reading_jobs(settings: Settings, home: Home) -> Iterator[JobStore | None]:
    """The same store, only for reading; None if there is no store yet. Raises StoreError."""
    if settings.jobs.database_url is None and not home.jobs_database.exists():
        yield None
        return
    store = JobStore.open_to_read(settings.jobs.database_url or home.jobs_database)
    if store is None:
        yield None
        return
    with store:
        yield store


def is_token_of_running_job(
    token: str, settings: Settings, home: Home, tokens: Tokens, *, pipeline: str
) -> bool:
    """Whether `token` is that of an attempt that runs now, of a job of this pipeline. Raises
    StoreError."""
    if not token.startswith(PREFIX):
        return False
    with reading_jobs(settings, home) as store:
        job = None if store is None else job_of_token(token, store, tokens.key.encode())
    return job is not None and job.spec.pipeline == pipeline


def jobs_schema(settings: Settings, home: Home) -> str | None:
    """The schema revision of the job store; None if there is no store yet. Changes nothing.

    Raises StoreError.
    """
    if settings.jobs.database_url is None and not home.jobs_database.exists():
        return None
    engine = connect(settings.jobs.database_url or home.jobs_database, only_reads=True)
    try:
        return check_jobs_schema(engine)
    finally:
        engine.dispose()


def check_schemas(settings: Settings, home: Home) -> None:
    """Raise HubError or StoreError if a newer release wrote one of the two databases.

    Call this before any service starts. A service upgrades its own database when it starts. It must
    not upgrade that database while the other database is too new for this release.
    """
    check_hub_schema(home.hub_dir / "hub.sqlite")
    jobs_schema(settings, home)
