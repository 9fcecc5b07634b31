"""Makes hubs tell the stack's receiver about pushes to the datasets that pipelines follow. The
stack's own hub gets one webhook, and each other hub (for example huggingface.co) one of its own."""

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
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
    list_webhooks,
    update_webhook,
)
from serving.http.server import host_name, is_loopback_name

ROUTE = "/webhooks/retrain"
"""The receiver's route for pushes. The receivers of other stacks have the same route, and such a
stack may have a webhook on this hub. So this path does not make a webhook the stack's own."""


@dataclass(frozen=True, kw_only=True)
class FollowedHub:
    """A hub that tells the receiver about pushes."""

    url: str
    datasets: tuple[str, ...]
    """The datasets on this hub that pipelines follow."""
    token: str | None = field(repr=False)
    """The stack's token for its own hub. The user's own token for all others."""
    post_to: str | None
    """The URL at which this hub can reach the receiver's route. None if there is no such URL."""
    record: Path | None = None
    """The file with the id of the stack's webhook on its own hub. None for another hub."""

    def webhooks(self) -> tuple[WebhookRecord, ...]:
        """All webhooks on this hub. Raises ReceiverError."""
        return list_webhooks(endpoint=self.url, token=self.token)

    def ours(self, webhooks: Iterable[WebhookRecord]) -> WebhookRecord | None:
        """The stack's webhook among those of this hub: the recorded one, or else the one that posts
        to the stack's receiver. None if there is none."""
        by_id = {each.id: each for each in webhooks}
        if self.record is not None:
            with suppress(FileNotFoundError, KeyError):
                return by_id[self.record.read_text(errors="replace")]
        return next((each for each in by_id.values() if each.url == self.post_to), None)

    def unwatched(self, ours: WebhookRecord | None) -> tuple[str, ...]:
        """The datasets that the webhook does not watch. The comparison ignores case, because a hub
        finds a repository by its name in upper or lower case."""
        watched = () if ours is None else ours.watched
        names = {item.name.lower() for item in watched if item.type == "dataset"}
        return tuple(dataset for dataset in self.datasets if dataset.lower() not in names)

    def subscribe(self, secret: str) -> str:
        """Create the webhook, or correct it; returns its id.

        The address and the secret are always set again. The hub may have stored a wrong secret,
        which it never shows. If `tokens.json` was replaced, the encryption key in it is new, and
        even the hub cannot decrypt the stored secret.

        On another hub, the webhook keeps what it watches, because the user may have added
        something. The user's other webhooks do not change. Raises ReceiverError."""
        ours = self.ours(self.webhooks())
        added, kept = self.unwatched(ours), () if ours is None else ours.watched
        if self.record is not None:
            added, kept = self.datasets, ()
        wanted: dict[str, Any] = {
            "url": self.post_to,
            "watched": [*kept, *(WatchedItem(type="dataset", name=name) for name in added)],
            # A person may have added domains.
            "domains": sorted({"repo", *(ours.domains if ours is not None else ())}),
            "secret": secret,
            "endpoint": self.url,
            "token": self.token,
        }
        return (create_webhook(**wanted) if ours is None else update_webhook(ours.id, **wanted)).id

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


def subscribe(settings: Settings, home: Home, tokens: Tokens) -> None:
    """Create the webhook on the stack's own hub. If it exists, correct it. If no pipeline follows a
    dataset on this hub, delete it.

    After a correction, the hub sends the events that waited because of a wrong address or secret. A
    webhook that a person disabled stays disabled.
    """
    hub = own_hub(settings, home, tokens)
    ours = hub.ours(hub.webhooks())
    if not hub.datasets:
        if ours is not None:
            delete_webhook(ours.id, endpoint=hub.url, token=hub.token)
        return
    write_by_rename(home.own_webhook_file, hub.subscribe(tokens.webhook), durable=True)
    if ours is not None and ours.status != "disabled":
        enable_webhook(ours.id, endpoint=hub.url, token=hub.token)


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
            webhook_id = hub.subscribe(tokens.webhook)
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


def own_hub(settings: Settings, home: Home, tokens: Tokens) -> FollowedHub:
    return FollowedHub(
        url=settings.hub_url,
        datasets=settings.datasets_on_hub,
        token=tokens.hub,
        post_to=settings.receiver_url + ROUTE,
        record=home.own_webhook_file,
    )


def other_hubs(settings: Settings, home: Home, tokens: Tokens) -> list[FollowedHub]:
    """The other hubs that have datasets which pipelines follow."""
    followed = defaultdict[str, dict[str, None]](dict)
    for pipeline in settings.pipelines:
        if (hub := settings.other_hub(pipeline)) is not None:
            followed[hub][pipeline.dataset] = None
    token = own_token(os.environ, tokens.hub)
    return [
        FollowedHub(
            url=hub,
            datasets=tuple(datasets),
            token=token,
            post_to=_receiver_seen_from(hub, settings, home),
        )
        for hub, datasets in followed.items()
    ]


def hub_credentials(settings: Settings, home: Home, tokens: Tokens) -> list[HubCredentials]:
    """The hubs, each with its token. When the receiver's public URL changes, the receiver uses the
    token to correct the URL in its webhook on the hub. Without another hub if the user has no
    token."""
    hubs = [own_hub(settings, home, tokens), *other_hubs(settings, home, tokens)]
    return [HubCredentials(endpoint=each.url, token=each.token) for each in hubs if each.token]


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
