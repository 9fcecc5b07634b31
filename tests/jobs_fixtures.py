"""Fixtures of the jobs' tests: a store on each database, and a clock that stands still."""

import os
import pwd
import shutil
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest
from sqlalchemy import create_engine, select, text

from jobs.database import reading
from jobs.job import Delivery, Job, outcome_of
from jobs.outcome import JobOutcome
from jobs.process import identify
from jobs.schema import DELIVERIES, job_id_of, matches_delivery
from jobs.spec import JobSpec, RevisionRange
from jobs.store import JobStore
from tests.ports import free_port

T = TypeVar("T")
DONE = JobOutcome(result="promoted")
FAILED = JobOutcome(result="failed", stage="train", reason="The loss is NaN.", exit_code=1)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def _postgres_bin() -> Path | None:
    on_path = shutil.which("initdb")
    folders = [Path(on_path).resolve().parent] if on_path else []
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((folder for folder in folders if (folder / "initdb").exists()), None)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    with running_postgres(fsync="off") as url:
        yield url


@contextmanager
def running_postgres(*, fsync: str) -> Iterator[str]:
    """The URL of a throwaway cluster's `postgres` database."""
    programs = _postgres_bin()
    if programs is None:
        pytest.skip("Postgres is not installed on this machine")
    user = None
    if os.getuid() == 0:  # Postgres refuses to run as root
        try:
            user = pwd.getpwnam("postgres").pw_name
        except KeyError:
            pytest.skip("there is no user `postgres` to run a cluster as")
    port = free_port()
    folder = Path(tempfile.mkdtemp(prefix="hotpush-pg-"))
    if user is not None:
        shutil.chown(folder, user)
    options = (
        f"-p {port} -c listen_addresses=127.0.0.1 -c unix_socket_directories='' -c fsync={fsync}"
    )

    def call(program: str, *arguments: str) -> None:
        subprocess.run(
            [programs / program, *arguments],
            user=user,
            cwd=folder,
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
        )

    try:
        call("initdb", "-D", "data", "-A", "trust", "-U", "postgres", "-E", "UTF8", "--no-sync")
        call("pg_ctl", "-D", "data", "-w", "-l", "log", "-o", options, "start")
        try:
            yield f"postgresql+psycopg://postgres@127.0.0.1:{port}/postgres"
        finally:
            call("pg_ctl", "-D", "data", "-w", "-m", "immediate", "stop")
    finally:
        shutil.rmtree(folder)


def answer_to(store: JobStore, source: str, delivery_id: str) -> dict[str, str] | None:
    """What the store has recorded of a delivery: `{"job": id}`. None if it does not know the
    delivery."""
    query = select(DELIVERIES).where(*matches_delivery(source, delivery_id))
    with reading(store._engine) as connection:
        row = connection.execute(query).one_or_none()
    return None if row is None else {"job": job_id_of(row.job_number)}


@pytest.fixture(params=["sqlite", "postgres"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty database."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'jobs.db'}"
    return new_schema(request.getfixturevalue("postgres_server"))


def _execute(server: str, statement: str) -> None:
    engine = create_engine(server, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(text(statement))
    engine.dispose()


def new_schema(server: str) -> str:
    """The URL of an empty schema on the cluster, which is made five times as fast as a database."""
    name = f"t{uuid.uuid4().hex}"
    _execute(server, f"CREATE SCHEMA {name}")
    return f"{server}?options=-csearch_path%3D{name}"


def new_database(server: str) -> str:
    """The URL of a new database on the cluster."""
    name = f"t{uuid.uuid4().hex}"
    _execute(server, f"CREATE DATABASE {name}")
    return server.removesuffix("postgres") + name


@pytest.fixture
def store(store_url: str, clock: Clock) -> Iterator[JobStore]:
    with JobStore.open(store_url, clock=clock) as opened:
        yield opened


def revisions(new: str, old: str | None = None) -> RevisionRange:
    return RevisionRange(
        repo="acme/faq", ref="refs/heads/main", old_sha=old, new_sha=new, delivery_ids=()
    )


def claim(store: JobStore, owner: str = "me", lease_seconds: float = 60) -> Job:
    """The job that is due, which runs now."""
    job = store.claim(owner, lease_seconds)
    assert job is not None and job.state == "RUNNING"
    return job


def lost(job: Job) -> JobOutcome:
    return outcome_of(job, "failed", stage="lost", reason="Its process vanished.")


def delivery(id: str, source: str = "hub") -> Delivery:
    return Delivery(source=source, id=id)


def spec(
    new: str | None = None,
    old: str | None = None,
    *,
    pipeline: str | None = "faq",
    make: Callable[..., JobSpec] = JobSpec,
    **values: object,
) -> JobSpec:
    """A job of the pipeline `faq`, for the commits `old..new` where given."""
    return make(
        **{
            "command": ("true",),
            "pipeline": pipeline,
            "revisions": None if new is None else revisions(new, old),
            **values,
        }
    )


def until(ask: Callable[[], T | None], seconds: float = 30.0, *, every_seconds: float = 0.005) -> T:
    """The first answer that is true; fails when there is none in time."""
    deadline = time.monotonic() + seconds
    while not (answer := ask()):
        assert time.monotonic() < deadline, f"waited {seconds} s in vain"
        time.sleep(every_seconds)
    return answer


def pids_in(log: Path, count: int = 1) -> list[int]:
    """The process ids that a job of `tests.jobs_program` wrote, once there are `count`."""

    def read() -> list[int]:
        lines = log.read_text().splitlines() if log.exists() else []
        pids = [int(line.split()[1]) for line in lines if line.startswith("pid ")]
        return pids if len(pids) >= count else []

    return until(read)


def is_gone(pid: int) -> bool:
    return identify(pid) is None
