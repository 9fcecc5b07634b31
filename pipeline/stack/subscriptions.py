"""Makes hubs tell the stack's receiver about pushes to the datasets that pipelines follow. The
stack's own hub gets one webhook, and each other hub (for example huggingface.co) one of its own."""

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from jobs.folder import read_json, write_by_rename
from pipeline.paths import Home
from pipeline.retrain.sources import own_token
from pipeline.settings import Settings
from pipeline.tokens import Tokens, secret_in_shell
from receiver.errors import ReceiverError
from receiver.tunnel import HubCredentials, remembered_urls
from receiver.webhooks import (
    WatchedItem,
    WebhookRecord,
    create_webhook,
    delete_webhook,
    enable_webhook,
    hub_errors,
    list_webhooks,
    update_webhook,
)
from serving.http.server import host_name, is_loopback_name

ROUTE = "/webhooks/retrain"
"""The receiver's route for pushes. The receivers of other stacks have the same route, and such a
stack may have a webhook on this hub. So this path does not make a webhook the stack's own."""


def own_webhook(
    webhooks: Iterable[WebhookRecord], settings: Settings, home: Home
) -> WebhookRecord | None:
    """The stack's own webhook, if it is among `webhooks`. `subscribe` records its id. If none has
    the recorded id, the stack's own webhook is the one that posts to the stack's receiver."""
    by_id = {each.id: each for each in webhooks}
    with suppress(FileNotFoundError, KeyError):
        return by_id[home.own_webhook_file.read_text(errors="replace")]
    url = settings.receiver_url + ROUTE
    return next((each for each in by_id.values() if each.url == url), None)


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

    hub = HubCredentials(endpoint=settings.hub_url, token=tokens.hub)
    webhooks = list_webhooks(endpoint=hub.endpoint, token=hub.token)
    ours = own_webhook(webhooks, settings, home)
    if not datasets:
        if ours is not None:
            delete_webhook(ours.id, endpoint=hub.endpoint, token=hub.token)
        return
    watched = [WatchedItem(type="dataset", name=dataset) for dataset in datasets]
    id = _create_or_correct(hub, ours, settings.receiver_url + ROUTE, watched, tokens.webhook)
    write_by_rename(home.own_webhook_file, id, durable=True)
    if ours is not None and ours.status != "disabled":
        enable_webhook(ours.id, endpoint=hub.endpoint, token=hub.token)


def _create_or_correct(
    hub: HubCredentials,
    ours: WebhookRecord | None,
    url: str | None,
    watched: list[WatchedItem],
    secret: str,
) -> str:
    """Returns the id of the webhook."""
    wanted: dict[str, Any] = {
        "url": url,
        "watched": watched,
        # A person may have added domains.
        "domains": sorted({"repo", *(ours.domains if ours is not None else ())}),
        "secret": secret,
        "endpoint": hub.endpoint,
        "token": hub.token,
    }
    return (create_webhook(**wanted) if ours is None else update_webhook(ours.id, **wanted)).id


def unwatched_datasets(datasets: Iterable[str], watched: Iterable[WatchedItem]) -> tuple[str, ...]:
    """The datasets that are not among the watched items. The comparison ignores case, because a hub
    finds a repository by its name in upper or lower case."""
    names = {item.name.lower() for item in watched if item.type == "dataset"}
    return tuple(dataset for dataset in datasets if dataset.lower() not in names)


def _create(dataset: str, settings: Settings, tokens: Tokens) -> None:
    """Create the dataset without a first commit, so that a first `git push` needs no pull. If the
    dataset exists, nothing changes."""
    from huggingface_hub import get_session
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status  # type: ignore[attr-defined]

    owner, _, name = dataset.partition("/")
    with hub_errors(settings.hub_url, f"the creation of the dataset {dataset}"):
        answer = get_session().post(
            f"{settings.hub_url}/api/repos/create",
            headers=build_hf_headers(token=tokens.hub),
            json={"type": "dataset", "organization": owner, "name": name, "empty": True},
        )
        if answer.status_code != HTTPStatus.CONFLICT:
            hf_raise_for_status(answer)


@dataclass(frozen=True, kw_only=True)
class OtherHub:
    url: str
    datasets: list[str]
    """The datasets on this hub that pipelines follow."""
    token: str | None = field(repr=False)
    """The user's own token, which is the same for all hubs."""
    post_to: str | None
    """The URL at which this hub can reach the receiver's route. None if there is no such URL."""

    def webhook(self) -> WebhookRecord | None:
        """The webhook on this hub that posts to the receiver; None if there is none. Raises
        ReceiverError."""
        found = list_webhooks(endpoint=self.url, token=self.token)
        return next((each for each in found if each.url == self.post_to), None)

    def hindrance(self) -> tuple[str, str] | None:
        """Why this hub cannot report pushes before the user has changed something, and what the
        user can change. None if it can report pushes."""
        names = ", ".join(self.datasets)
        if self.post_to is None:
            return (
                f"{self.url} cannot reach this receiver to report pushes to {names}",
                "set `tunnel` or `public_url` under [receiver], then pipeline down and pipeline up;"
                " until then, train by hand: pipeline jobs run",
            )
        if self.token is None:
            return (
                f"there is no token for {self.url}, which has {names}",
                "run `hf auth login`, or set HF_TOKEN to a token that may manage webhooks there, "
                "then pipeline down, then pipeline up",
            )
        return None


def credentials_of_other_hubs(
    settings: Settings, home: Home, tokens: Tokens
) -> list[HubCredentials]:
    """The other hubs, with the user's own token. When the receiver's public URL changes, the
    receiver uses the token to correct the URL in its webhook on the hub. Empty if the user has no
    token."""
    found = other_hubs(settings, home, tokens)
    return [HubCredentials(endpoint=each.url, token=each.token) for each in found if each.token]


def subscribe_at_other_hubs(settings: Settings, home: Home, tokens: Tokens) -> Iterator[str]:
    """Create the webhooks on the other hubs, or correct the webhooks that exist. Yields one line of
    text for each hub. The line says what the hub does now, or what the user must do. If a hub
    cannot be reached, this function raises no error, because the stack can also run without this
    hub."""
    for hub in other_hubs(settings, home, tokens):
        names = ", ".join(hub.datasets)
        if (hindrance := hub.hindrance()) is not None:
            yield "; ".join(hindrance)
            continue
        try:
            webhook_id = _subscribe(hub, tokens.webhook)
        except ReceiverError as error:
            watch = " ".join(f"--watch dataset:{name}" for name in hub.datasets)
            yield (
                f"could not create or correct the webhook at {hub.url} for {names}: {error} To "
                f"create the webhook by hand: HF_TOKEN=… pipeline webhooks create --endpoint "
                f"{hub.url} --url {hub.post_to} {watch} --domain repo --secret "
                f"{secret_in_shell(home.tokens_file)}"
            )
        else:
            yield f"{hub.url} reports pushes to {names}: {webhook_id} posts to {hub.post_to}"


def other_hubs(settings: Settings, home: Home, tokens: Tokens) -> list[OtherHub]:
    """The other hubs that have datasets which pipelines follow."""
    followed: dict[str, list[str]] = {}
    for pipeline in settings.pipelines:
        hub = settings.other_hub(pipeline)
        if hub is not None and pipeline.dataset not in followed.setdefault(hub, []):
            followed[hub].append(pipeline.dataset)
    token = own_token(os.environ, tokens.hub)
    return [
        OtherHub(
            url=hub,
            datasets=datasets,
            token=token,
            post_to=_receiver_seen_from(hub, settings, home),
        )
        for hub, datasets in followed.items()
    ]


def _subscribe(hub: OtherHub, secret: str) -> str:
    """Create or correct the webhook; returns its id. This webhook keeps what it watches, because
    the user may have added something. The user's other webhooks do not change."""
    ours = hub.webhook()
    kept = () if ours is None else ours.watched
    missing = unwatched_datasets(hub.datasets, kept)
    watched = [*kept, *(WatchedItem(type="dataset", name=name) for name in missing)]
    credentials = HubCredentials(endpoint=hub.url, token=hub.token)
    return _create_or_correct(credentials, ours, hub.post_to, watched, secret)


def _receiver_seen_from(hub: str, settings: Settings, home: Home) -> str | None:
    """The URL at which this hub can reach the receiver's route. None if there is no such URL, or if
    the receiver's tunnel has no URL yet."""
    receiver = settings.receiver
    if receiver.public_url is not None:
        return receiver.public_url.rstrip("/") + ROUTE
    if receiver.tunnel is not None:
        # The receiver writes the URL of its tunnel to this file before it answers any request, so
        # the file exists when the stack is up.
        try:
            urls = read_json(remembered_urls(home.root, receiver.port))
        except OSError:
            urls = None
        return urls[0] + ROUTE if urls else None
    return settings.receiver_url + ROUTE if is_loopback_name(host_name(hub)) else None
