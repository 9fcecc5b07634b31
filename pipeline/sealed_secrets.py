"""A check of `pipeline doctor`: tries to decrypt the secrets of webhooks and of pending jobs with
the key in `tokens.json` (or in `PIPELINE_SECRET_KEY`). If this key cannot decrypt a secret, the
secret is lost, unless somebody restores the old key."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing

from cryptography.fernet import Fernet, InvalidToken

from jobs.errors import JobError
from pipeline.findings import Finding, ok, wrong
from pipeline.hub.database import SCHEMA_REVISION, check_schema
from pipeline.hub.errors import HubError
from pipeline.job_store import reading_jobs
from pipeline.paths import Home
from pipeline.settings import Settings
from pipeline.subscriptions import own_webhook_id

CAUSE = "encrypted with another key (tokens.json was replaced, or PIPELINE_SECRET_KEY has changed)"
_CHECK = "secrets"


def check_secrets(home: Home, settings: Settings, key: str) -> Iterator[Finding]:
    """Checks whether the key decrypts the secrets of webhooks (in the hub's database) and of
    pending jobs (in the job store). This function does not change these databases.

    Yields a finding for each webhook and each job with a secret that the key cannot decrypt, and
    for each database whose secrets were not checked. If the key is not a Fernet key, yields only a
    finding about the key. If the key decrypts every secret, yields nothing.
    """
    try:
        fernet = Fernet(key)
    except ValueError:
        yield wrong(
            _CHECK,
            f"the key in {home.tokens_file} is not a Fernet key, so it decrypts no secret",
            "restore tokens.json from a backup, or delete it to get new tokens; without the old "
            "key, the secrets in the databases are lost",
        )
        return
    yield from _lost_webhook_secrets(home, settings, fernet)
    yield from _lost_job_secrets(home, settings, fernet)


def _lost_webhook_secrets(home: Home, settings: Settings, fernet: Fernet) -> Iterator[Finding]:
    database = home.hub_dir / "hub.sqlite"
    query = "SELECT id, url, job_id, encrypted_secret, encrypted_secrets FROM webhooks"
    try:
        schema = check_schema(database)
        if schema is None:
            return  # the hub was never started
        if schema != SCHEMA_REVISION:
            yield ok(
                _CHECK,
                "the secrets of webhooks are not checked, because the hub's database has an older "
                "schema; the next start of the stack upgrades it",
            )
            return
        with closing(sqlite3.connect(f"{database.as_uri()}?mode=ro", uri=True)) as connection:
            rows = connection.execute(query).fetchall()
    except (HubError, sqlite3.Error) as error:
        yield _not_read("webhooks", "the hub's database", error)
        return
    own_id = own_webhook_id({row[0]: row[1] for row in rows}, settings, home)
    for id, url, job_id, secret, variables in rows:
        options = [] if _can_decrypt(fernet, secret) else ["--secret …"]
        if not _can_decrypt(fernet, variables):
            options.append(f"--job-id {job_id} --secrets NAME=VALUE")
        if not options:
            continue
        step = f"set the secret again: pipeline webhooks update {id} {' '.join(options)}"
        if id == own_id:
            step = "restart the stack to set it again: pipeline down && pipeline up --detach"
        target = url or f"job {job_id}"
        yield _lost(
            f"webhook {id} to {target} delivers nothing, because its secret was {CAUSE}", step
        )


def _lost_job_secrets(home: Home, settings: Settings, fernet: Fernet) -> Iterator[Finding]:
    try:
        with reading_jobs(settings, home) as store:
            waiting = [] if store is None else [*store.list(state="SCHEDULING")]
    except JobError as error:
        yield _not_read("jobs", "the job database", error)
        return
    for job in waiting:
        sealed = job.spec.sealed_env
        if sealed is not None and not _can_decrypt(fernet, sealed.encode()):
            yield _lost(
                f"{job.id} cannot start, because its secrets were {CAUSE}",
                f"pipeline jobs cancel {job.id}, then submit the job again with its secrets",
            )


def _lost(message: str, next_step: str) -> Finding:
    old_key = "the old key, in tokens.json or in PIPELINE_SECRET_KEY"
    return wrong(_CHECK, message, f"{next_step}; or restore {old_key}")


def _not_read(owners: str, database: str, error: Exception) -> Finding:
    return wrong(
        _CHECK,
        f"the secrets of {owners} are not checked, because {database} cannot be read: {error}",
        "upgrade hotpush, or restore a backup",
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
