"""Removes old deliveries, and old events that have no delivery any more. It reads the old rows
without a lock and deletes a few at a time, so that no push waits."""

import time
from collections.abc import Sequence

from sqlalchemy import and_, delete, exists, or_, select
from sqlalchemy.sql.elements import ColumnElement

from pipeline.hub.database import Database
from pipeline.hub.schema import deliveries, events, webhooks

BATCH = 200


def prune(database: Database, *, keep_days: float) -> None:
    """Removes deliveries that ended more than `keep_days` days ago, and then the events of that age
    that have no delivery.

    Keeps the dead deliveries of a suspended webhook, because some are sent when its suspension
    ends.
    """
    before = time.time() - 86400 * keep_days
    _remove(database, deliveries.c.id, _is_over(before))
    told = exists().where(deliveries.c.event_seq == events.c.seq)
    _remove(database, events.c.seq, and_(events.c.created_at < before, ~told))


def _is_over(before: float) -> ColumnElement[bool]:
    suspended = select(webhooks.c.id).where(webhooks.c.suspended_at.is_not(None))
    return and_(
        deliveries.c.last_attempt_at < before,
        deliveries.c.created_at < before,
        deliveries.c.queued_at < before,
        or_(
            deliveries.c.status == "delivered",
            and_(deliveries.c.status == "dead", deliveries.c.webhook_id.not_in(suspended)),
        ),
    )


def _remove(database: Database, key: ColumnElement[object], is_over: ColumnElement[bool]) -> None:
    with database.read() as connection:
        keys: Sequence[object] = connection.scalars(select(key).where(is_over)).all()
    for first in range(0, len(keys), BATCH):
        # Check the condition again, because a delivery may have been replayed meanwhile. Relaxed:
        # if a power cut brings some rows back, the next call removes them.
        with database.write_relaxed() as connection:
            batch = key.in_(keys[first : first + BATCH])
            connection.execute(delete(key.table).where(batch, is_over))
