"""Brings a store's schema up to date, by Alembic and without an `alembic.ini`."""

from pathlib import Path

from sqlalchemy import Connection, Engine, inspect, text

from jobs.errors import NewerSchema
from jobs.schema import reading, writing

HEAD = "0002"
"""The newest revision under `versions/`; a store that is at it opens without loading Alembic."""


def migrate(engine: Engine) -> None:
    """Create or upgrade the tables, whole or not at all.

    Raises NewerSchema for a database that a newer release wrote; it is not touched.
    """
    if check_schema(engine) == HEAD:
        return
    with writing(engine) as connection:
        # Again: another process may have been quicker.
        if _checked(engine, connection) != HEAD:
            upgrade(connection, HEAD)


def check_schema(engine: Engine) -> str | None:
    """The schema's revision, None where there are no tables yet. Raises as `migrate`; changes
    nothing."""
    with reading(engine) as connection:
        return _checked(engine, connection)


def _checked(engine: Engine, connection: Connection) -> str | None:
    revision = _revision(connection)
    if revision not in (None, HEAD, *_known_revisions()):
        shown = engine.url.render_as_string(hide_password=True)
        raise NewerSchema(
            f"The job store {shown} has schema {revision!r}, and this release knows none "
            f"beyond {HEAD!r}: a newer release wrote it. It was not touched; upgrade hotpush."
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
    """Within the connection's transaction."""
    from alembic import command
    from alembic.config import Config

    config = Config()
    # A "%" in the path would be read as an interpolation.
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    config.attributes["connection"] = connection
    command.upgrade(config, revision)
