"""Run by Alembic: migrates over the connection that `pipeline.hub.database` hands it."""

from alembic import context

context.configure(connection=context.config.attributes["connection"])
context.run_migrations()
