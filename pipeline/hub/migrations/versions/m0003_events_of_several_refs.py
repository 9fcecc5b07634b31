"""An event names all refs that one push moved; before, each ref had an event of its own."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("events", sa.Column("updated_refs", sa.JSON, nullable=False, server_default="[]"))
    op.execute(
        "UPDATE events SET updated_refs = json_array(json_object("
        "'ref', ref, 'old_sha', old_sha, 'new_sha', new_sha)) WHERE ref IS NOT NULL"
    )
    for column in ("ref", "old_sha", "new_sha"):
        op.drop_column("events", column)
