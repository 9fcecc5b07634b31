"""All tables. Until the first release, there is only this migration: it follows `schema.py`, and a
database of an older commit is refused."""

from alembic import op

from pipeline.hub.schema import metadata

revision = "1"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    metadata.create_all(op.get_bind())
