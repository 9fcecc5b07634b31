"""The schema of the job database, step by step (Alembic, run by the store)."""
