"""Creates the tables of the job store, and records which schema they have. There is only one schema
so far, so nothing is upgraded."""

from sqlalchemy import Connection, Engine, insert, inspect, text

from jobs.errors import OtherSchema
from jobs.schema import CHANGES, METADATA, locked, reading

HEAD = "jobs1"
"""The schema that `jobs/schema.py` declares. It is recorded as Alembic, a library that upgrades
database schemas, records its revisions."""


def migrate(engine: Engine) -> None:
    """Create the tables in one transaction. Raises OtherSchema, and changes nothing, if another
    version of hotpush wrote the database."""
    if check_schema(engine) == HEAD:
        return
    with locked(engine) as connection:
        # Check again under the write lock, because another process may have created the tables
        # since the first check.
        if _checked_revision(engine, connection) is None:
            METADATA.create_all(connection)
            connection.execute(insert(CHANGES).values(number=0))
            connection.execute(text("CREATE TABLE alembic_version (version_num VARCHAR NOT NULL)"))
            connection.execute(text("INSERT INTO alembic_version VALUES (:head)"), {"head": HEAD})


def check_schema(engine: Engine) -> str | None:
    """The revision of the store's schema; None if there are no tables yet. Changes nothing.

    Raises OtherSchema.
    """
    with reading(engine) as connection:
        return _checked_revision(engine, connection)


def _checked_revision(engine: Engine, connection: Connection) -> str | None:
    if not inspect(connection).has_table("alembic_version"):
        return None
    revision: str | None = connection.scalar(text("SELECT version_num FROM alembic_version"))
    if revision != HEAD:
        shown = engine.url.render_as_string(hide_password=True)
        raise OtherSchema(
            f"The job store {shown} has schema {revision!r}, which this version of hotpush cannot "
            f"use (it needs {HEAD!r}): another version of hotpush wrote the job store. Nothing was "
            "changed; use that version, or move the database away to begin with an empty one."
        )
    return revision
