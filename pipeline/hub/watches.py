"""Finds what a webhook watches although it does not exist, such as a misspelt repository."""

import difflib
from collections.abc import Collection, Iterator

from pipeline.hub.names import REPOSITORY_TYPES, RepositoryName
from pipeline.hub.webhook_store import HubWatchedItem, StoredWebhook


def warnings(webhook: StoredWebhook, present: Collection[RepositoryName]) -> list[str]:
    """A warning for each watched item of which the webhook gets no events now. It is no error,
    because the repository may still be created, and the webhook then gets its events. `present` are
    the names of all repositories."""
    return [reason for item in webhook.watched for reason in _in_vain(item, present)]


def _in_vain(item: HubWatchedItem, present: Collection[RepositoryName]) -> Iterator[str]:
    if any(item.covers(name) for name in present):
        return
    if item.type in ("org", "user"):
        yield f"{item} has no repository here" + _close(item.name, {each.owner for each in present})
    elif item.type not in REPOSITORY_TYPES:
        yield f"{item} sends no event: this hub has no {item.type}s"
    else:
        known = {f"{each.type}:{each.id}" for each in present}
        yield f"there is no {item} here" + _close(str(item), known)


def _close(wanted: str, known: Collection[str]) -> str:
    close = difflib.get_close_matches(wanted, sorted(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""
