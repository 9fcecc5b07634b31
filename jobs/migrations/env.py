"""Runs the migrations of the job store. Alembic, a library that upgrades database schemas, executes
this module. The function `jobs.migrations._create` has put the database connection into Alembic's
configuration."""

from alembic import context

from jobs.schema import METADATA

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=METADATA,
    render_as_batch=True,  # SQLite cannot alter most of a table in place
)
with context.begin_transaction():
    context.run_migrations()
