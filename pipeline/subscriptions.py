"""Makes the hub deliver events to the receiver. For this, the hub gets one webhook that watches
every dataset that a pipeline follows."""

from http import HTTPStatus
from urllib.parse import urlsplit

from pipeline.moved_datasets import moved_datasets
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


def subscribe(settings: Settings, tokens: Tokens) -> None:
    """Create each dataset and the webhook if it does not exist. If the webhook exists, correct it.
    A dataset that was moved is watched under its present name.

    The webhook gets the receiver's address and secret even if they seem unchanged. The hub does not
    tell which secret it stored, and it cannot read this secret if `tokens.json` was replaced.
    Events that waited because of a wrong address or secret are then sent at once. A webhook that a
    person disabled stays disabled.
    """
    moved = moved_datasets(settings, tokens)
    # A new dataset of the old name would end the redirect, and clones would push into it.
    datasets = tuple(moved.get(each, each) for each in settings.datasets_on_hub)
    for dataset in datasets:
        _create(dataset, settings, tokens)

    url = settings.receiver_url + ROUTE
    watched = tuple(WatchedItem(type="dataset", name=dataset) for dataset in datasets)
    ours = next(
        (
            webhook
            for webhook in list_webhooks(endpoint=settings.hub_url, token=tokens.hub)
            if webhook.url is not None and urlsplit(webhook.url).path == ROUTE
        ),
        None,
    )
    if not watched:
        if ours is not None:
            delete_webhook(ours.id, endpoint=settings.hub_url, token=tokens.hub)
    elif ours is None:
        create_webhook(
            url=url,
            watched=watched,
            domains=["repo"],
            secret=tokens.webhook,
            endpoint=settings.hub_url,
            token=tokens.hub,
        )
    else:
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


def _create(dataset: str, settings: Settings, tokens: Tokens) -> None:
    """Create the dataset without a first commit, so that a first `git push` needs no pull. Do
    nothing if the dataset is there."""
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
