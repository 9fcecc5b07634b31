"""The outbox and the comparison of refs, against plain models of what they promise."""

import tempfile
from pathlib import Path
from unittest import mock

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.hub import database as tables
from pipeline.hub import events, webhooks
from pipeline.hub.database import open_database
from pipeline.hub.events import EventLog, record_ref_changes
from pipeline.hub.repositories import RepositoryName
from pipeline.hub.routes.webhooks import WebhookRequest, create_webhook
from pipeline.hub.settings import HubSettings
from pipeline.hub.webhooks import Attempt, HubWatchedItem
from receiver.payload import WebhookPayload
from tests.hub_fixtures import SECRET_KEY, add_row

SETTINGS = HubSettings(delivery_schedule_seconds=(0, 0, 0))
NAME = RepositoryName(type="dataset", owner="local", name="facts")

refs = st.dictionaries(
    st.sampled_from(["refs/heads/main", "refs/heads/side", "refs/tags/v1"]),
    st.sampled_from(["a" * 40, "b" * 40, "c" * 40]),
)
answers = st.sampled_from([200, 204, 302, 404, 500, None, "refused"])


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(states=st.lists(refs, max_size=6), outcomes=st.lists(answers, max_size=40))
def test_every_ref_change_is_delivered_or_dead_and_in_order(
    states: list[dict[str, str]], outcomes: list[int | str | None]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        database = open_database(root)
        log = EventLog(database=database, hub_url="http://hub")
        with database.write() as connection:
            repository = add_row(connection, root, NAME)
            webhook = create_webhook(
                connection,
                WebhookRequest(
                    url="http://x/", watched=(HubWatchedItem(type="user", name="local"),)
                ),
                SECRET_KEY,
            )
        for state in states:
            with mock.patch.object(events, "read_refs", return_value=state):
                record_ref_changes(repository, log)

        sent: dict[str, int] = {}
        delivered: list[str] = []
        pending_outcomes = list(outcomes)
        while True:
            with database.read() as connection:
                head = webhooks.oldest_pending(connection, webhook.id)
            if head is None:
                break
            due = head[0]
            outcome = pending_outcomes.pop(0) if pending_outcomes else 200
            refused = outcome == "refused"
            attempt = Attempt(
                started_at=0,
                milliseconds=1,
                response_status=outcome if isinstance(outcome, int) else None,
                refused=refused,
            )
            if not refused:
                sent[due.id] = sent.get(due.id, 0) + 1
            with database.write() as connection:
                status, _ = webhooks.settle(connection, due, webhook, attempt, SETTINGS)
            assert (status == "delivered") == (outcome in (200, 204))
            assert (status == "dead") == (
                status != "delivered"
                and sent.get(due.id, 0) >= len(SETTINGS.delivery_schedule_seconds)
            )
            if status == "delivered":
                delivered.append(due.id)

        # Followed from nothing, the events lead from each state to the next, dead ones included.
        with database.read() as connection:
            rows = connection.execute(
                tables.deliveries.select().order_by(tables.deliveries.c.event_seq)
            ).all()
        replayed: dict[str, str] = {}
        for row in rows:
            assert row.status in ("delivered", "dead")
            payload = WebhookPayload.model_validate_json(row.payload)
            assert payload.updatedRefs
            for change in payload.updatedRefs:
                assert change.oldSha == replayed.get(change.ref)
                assert change.oldSha != change.newSha
                if change.newSha is None:
                    del replayed[change.ref]
                else:
                    replayed[change.ref] = change.newSha
        assert replayed == (states[-1] if states else {})
        order = [row.id for row in rows if row.status == "delivered"]
        assert delivered == order
        database.close()
