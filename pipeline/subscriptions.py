"""Makes the stack's own hub deliver events to the stack's receiver. For this, the hub gets one
webhook. The webhook watches every dataset on this hub that a pipeline follows."""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from http import HTTPStatus

from jobs.folder import write_atomically
from pipeline.paths import Home
from pipeline.settings import Settings
from pipeline.tokens import Tokens
from receiver.webhooks import (
    WatchedItem,
    create_webhook,
    delete_webhook,
    enable_webhook,
    list_webhooks,
    update_webhook,
)

ROUTE = "/webhooks/retrain"
"""The receiver's route for pushes. The receivers of other stacks have the same route, and such a
stack may have a webhook on this hub. So this path does not make a webhook the stack's own."""


def own_webhook_id(
    webhooks: Mapping[str, str | None], settings: Settings, home: Home
) -> str | None:
    """The id of the stack's own webhook, if it is among `webhooks` (the id of each webhook → the
    URL to which it posts). None if it is not.

    `subscribe` records the id. An older version has recorded no id, so if none of the webhooks has
    the recorded id, the stack's own webhook is the one that posts to the stack's receiver.
    """
    with suppress(FileNotFoundError):
        recorded = home.own_webhook_file.read_text(errors="replace")
        if recorded in webhooks:
            return recorded
    url = settings.receiver_url + ROUTE
    return next((id for id, posts_to in webhooks.items() if posts_to == url), None)


def subscribe(settings: Settings, home: Home, tokens: Tokens) -> None:
    """Create each followed dataset and the webhook, if they do not exist yet. If the webhook
    exists, correct it. If no pipeline follows a dataset on this hub, delete the webhook.

    If the webhook exists, this function always sets the webhook's address and secret again. The
    secret that the hub has stored may be wrong, and this function cannot check this secret, because
    the hub never shows a secret. If `tokens.json` was replaced, the encryption key in it is new,
    and even the hub cannot decrypt the stored secret. After the correction, the hub sends the
    events that waited because of a wrong address or secret. A webhook that a person disabled stays
    disabled.
    """
    datasets = settings.datasets_on_hub
    for dataset in datasets:
        _create(dataset, settings, tokens)

    url = settings.receiver_url + ROUTE
    watched = tuple(WatchedItem(type="dataset", name=dataset) for dataset in datasets)
    webhooks = {
        each.id: each for each in list_webhooks(endpoint=settings.hub_url, token=tokens.hub)
    }
    own_id = own_webhook_id({id: each.url for id, each in webhooks.items()}, settings, home)
    ours = None if own_id is None else webhooks[own_id]
    if not watched:
        if ours is not None:
            delete_webhook(ours.id, endpoint=settings.hub_url, token=tokens.hub)
    elif ours is None:
        created = create_webhook(
            url=url,
            watched=watched,
            domains=["repo"],
            secret=tokens.webhook,
            endpoint=settings.hub_url,
            token=tokens.hub,
        )
        write_atomically(home.own_webhook_file, created.id, durable=True)
    else:
        write_atomically(home.own_webhook_file, ours.id, durable=True)
        update_webhook(
            ours.id,
            url=url,
            watched=watched,
            secret=tokens.webhook,
            endpoint=settings.hub_url,
            token=tokens.hub,
        )
        if ours.status != "disabled":
            enable_webhook(ours.id, endpoint=settings.hub_url, token=tokens.hub)


def unwatched_datasets(datasets: Iterable[str], watched: Iterable[WatchedItem]) -> tuple[str, ...]:
    """The datasets that are not among the watched items. The comparison ignores case, because a hub
    finds a repository by its name in upper or lower case."""
    names = {item.name.lower() for item in watched if item.type == "dataset"}
    return tuple(dataset for dataset in datasets if dataset.lower() not in names)


def _create(dataset: str, settings: Settings, tokens: Tokens) -> None:
    """Create the dataset without a first commit, so that a first `git push` needs no pull. If the
    dataset exists, nothing changes."""
    from huggingface_hub.utils import (  # type: ignore[attr-defined]
        build_hf_headers,
        get_session,
        hf_raise_for_status,
    )

    owner, _, name = dataset.partition("/")
    answer = get_session().post(
        f"{settings.hub_url}/api/repos/create",
        headers=build_hf_headers(token=tokens.hub),
        json={"type": "dataset", "organization": owner, "name": name, "empty": True},
    )
    if answer.status_code != HTTPStatus.CONFLICT:
        hf_raise_for_status(answer)
