"""Makes the stack's own hub deliver events to the stack's receiver. For this, the hub gets one
webhook. The webhook watches every dataset on this hub that a pipeline follows."""

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
"""The receiver's route for pushes. A webhook on the stack's hub is the stack's own webhook if the
webhook's URL has this path."""


def subscribe(settings: Settings, tokens: Tokens) -> None:
    """Create each followed dataset and the webhook, if they do not exist yet. If the webhook
    exists, correct it. If no pipeline follows a dataset on this hub, delete the webhook. The
    webhook watches a moved dataset under its present name.

    If the webhook exists, this function always sets the webhook's address and secret again. The
    secret that the hub has stored may be wrong, and this function cannot check this secret, because
    the hub never shows a secret. If `tokens.json` was replaced, the encryption key in it is new,
    and even the hub cannot decrypt the stored secret. After the correction, the hub sends the
    events that waited because of a wrong address or secret. A webhook that a person disabled stays
    disabled.
    """
    moved = moved_datasets(settings, tokens)
    # Do not create a dataset with the old name of a moved dataset. The hub would then no longer
    # redirect the old name to the new name, and old clones would push into the wrong dataset.
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
