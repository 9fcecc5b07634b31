"""Creates and upgrades the tables of the job store with Alembic, a library that upgrades database
schemas. There is no `alembic.ini`: the function `upgrade` makes Alembic's configuration."""

from pathlib import Path

from sqlalchemy import Connection, Engine, inspect, text

from jobs.errors import NewerSchema
from jobs.schema import reading, writing

HEAD = "0003"
"""The newest schema revision under `versions/`. If a store already has this revision, `migrate`
does not load Alembic, because loading Alembic takes time."""


def migrate(engine: Engine) -> None:
    """Create or upgrade the tables in one transaction.

    If a newer version of hotpush wrote the database, this function raises NewerSchema and changes
    nothing.
    """
    if check_schema(engine) == HEAD:
        return
    with writing(engine) as connection:
        # Check again under the write lock, because another process may have upgraded the store
        # since the first check.
        if _checked_revision(engine, connection) != HEAD:
            upgrade(connection, HEAD)


def check_schema(engine: Engine) -> str | None:
    """The revision of the store's schema; None if there are no tables yet. Changes nothing.

    Raises NewerSchema.
    """
    with reading(engine) as connection:
        return _checked_revision(engine, connection)


def _checked_revision(engine: Engine, connection: Connection) -> str | None:
    revision = _revision(connection)
    if revision not in (None, HEAD, *_known_revisions()):
        shown = engine.url.render_as_string(hide_password=True)
        raise NewerSchema(
            f"The job store {shown} has schema {revision!r}, but this version of hotpush knows "
            f"schemas up to {HEAD!r}: a newer version of hotpush wrote the job store. Nothing was "
            "changed. Upgrade hotpush."
        )
    return revision


def _revision(connection: Connection) -> str | None:
    if not inspect(connection).has_table("alembic_version"):
        return None
    revision = connection.scalar(text("SELECT version_num FROM alembic_version"))
    return None if revision is None else str(revision)


def _known_revisions() -> set[str]:
    return {path.name.split("_")[0] for path in (Path(__file__).parent / "versions").glob("0*.py")}


def upgrade(connection: Connection, revision: str) -> None:
    """Upgrade the store to `revision`, within the transaction of `connection`."""
    from alembic import command
    from alembic.config import Config

    config = Config()
    # Double each "%" of the path, because the configuration takes a single "%" for a placeholder.
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    config.attributes["connection"] = connection
    command.upgrade(config, revision)
