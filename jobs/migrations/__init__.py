"""Creates the tables of the job store with Alembic, a library that upgrades database schemas. There
is no `alembic.ini`: the function `_create` makes Alembic's configuration."""

from pathlib import Path

from sqlalchemy import Connection, Engine, inspect, text

from jobs.errors import OtherSchema
from jobs.schema import locked, reading

HEAD = "jobs1"
"""The schema under `versions/`. If a store already has it, `migrate` does not load Alembic, because
loading Alembic takes time."""


def migrate(engine: Engine) -> None:
    """Create the tables in one transaction. Raises OtherSchema, and changes nothing, if another
    version of hotpush wrote the database."""
    if check_schema(engine) == HEAD:
        return
    with locked(engine) as connection:
        # Check again under the write lock, because another process may have created the tables
        # since the first check.
        if _checked_revision(engine, connection) != HEAD:
            _create(connection)


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
    if revision not in (None, HEAD):
        shown = engine.url.render_as_string(hide_password=True)
        raise OtherSchema(
            f"The job store {shown} has schema {revision!r}, which this version of hotpush cannot "
            f"use (it needs {HEAD!r}): another version of hotpush wrote the job store. Nothing was "
            "changed; use that version, or move the database away to begin with an empty one."
        )
    return revision


def _create(connection: Connection) -> None:
    from alembic import command
    from alembic.config import Config

    config = Config()
    # Double each "%" of the path, because the configuration takes a single "%" for a placeholder.
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    config.attributes["connection"] = connection
    command.upgrade(config, HEAD)
