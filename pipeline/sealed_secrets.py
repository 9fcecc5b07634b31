"""Finds secrets of webhooks and of waiting jobs that the key in `tokens.json` (or in
`PIPELINE_SECRET_KEY`) cannot decrypt. Such a secret is lost, unless somebody restores the old
key."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from urllib.parse import urlsplit

from cryptography.fernet import Fernet, InvalidToken

from jobs.errors import JobError
from pipeline.job_store import reading_jobs
from pipeline.paths import Home
from pipeline.settings import Settings
from pipeline.subscriptions import ROUTE

CAUSE = "encrypted with another key (tokens.json was replaced, or PIPELINE_SECRET_KEY has changed)"


@dataclass(frozen=True)
class LostSecret:
    message: str
    next_step: str


def lost_secrets(home: Home, settings: Settings, key: str) -> Iterator[LostSecret]:
    """The lost secrets in the hub's database and in the job store. This function does not change
    these databases. If one of them cannot be read, its secrets are left out."""
    try:
        fernet = Fernet(key)
    except ValueError:
        return
    yield from _lost_webhook_secrets(home, fernet)
    yield from _lost_job_secrets(home, settings, fernet)


def _lost_webhook_secrets(home: Home, fernet: Fernet) -> Iterator[LostSecret]:
    database = home.hub_dir / "hub.sqlite"
    if not database.exists():
        return
    query = "SELECT id, url, job_id, encrypted_secret, encrypted_secrets FROM webhooks"
    try:
        with closing(sqlite3.connect(f"{database.as_uri()}?mode=ro", uri=True)) as connection:
            rows = connection.execute(query).fetchall()
    except sqlite3.Error:
        return
    for id, url, job_id, secret, variables in rows:
        options = [] if _can_decrypt(fernet, secret) else ["--secret …"]
        if not _can_decrypt(fernet, variables):
            options.append(f"--job-id {job_id} --secrets NAME=VALUE")
        if not options:
            continue
        step = f"set the secret again: pipeline webhooks update {id} {' '.join(options)}"
        if urlsplit(url).path == ROUTE:
            step = "restart the stack to set it again: pipeline down && pipeline up --detach"
        target = url or f"job {job_id}"
        yield LostSecret(
            f"webhook {id} to {target} delivers nothing, because its secret was {CAUSE}", step
        )


def _lost_job_secrets(home: Home, settings: Settings, fernet: Fernet) -> Iterator[LostSecret]:
    try:
        with reading_jobs(settings, home) as store:
            waiting = [] if store is None else [*store.list(state="SCHEDULING")]
    except JobError:
        return
    for job in waiting:
        sealed = job.spec.sealed_env
        if sealed is not None and not _can_decrypt(fernet, sealed.encode()):
            yield LostSecret(
                f"{job.id} cannot start, because its secrets were {CAUSE}",
                f"pipeline jobs cancel {job.id}, then submit the job again with its secrets",
            )


def _can_decrypt(fernet: Fernet, sealed: bytes | None) -> bool:
    """Whether the key can decrypt the secret `sealed`. Also True if `sealed` is None, because then
    there is nothing to decrypt."""
    if sealed is None:
        return True
    try:
        fernet.decrypt(sealed)
    except InvalidToken:
        return False
    return True
