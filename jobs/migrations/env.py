"""Alembic executes this module, which runs the migrations on the connection that
`jobs.migrations.upgrade` has put into the configuration."""

from alembic import context

from jobs.schema import METADATA

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=METADATA,
    render_as_batch=True,  # SQLite cannot alter most of a table in place
)
with context.begin_transaction():
    context.run_migrations()
