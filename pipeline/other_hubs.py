"""Creates webhooks on other hubs (all hubs except the stack's own, for example huggingface.co).
With these webhooks, the other hubs tell the stack's receiver about pushes to the datasets that
pipelines follow."""

import ipaddress
import json
import os
from collections.abc import Iterator
from urllib.parse import urlsplit

from pipeline.facts import Facts, Finding, ok, wrong
from pipeline.paths import Home
from pipeline.retrain.own_token import own_token
from pipeline.settings import Settings
from pipeline.subscriptions import ROUTE, unwatched_datasets
from pipeline.tokens import Tokens, secret_in_shell
from receiver.errors import ReceiverError
from receiver.tunnel import HubCredentials, remembered_urls
from receiver.webhooks import (
    WatchedItem,
    WebhookRecord,
    create_webhook,
    list_webhooks,
    update_webhook,
)

_CHECK = "another hub"
_RESTART = "pipeline down, then pipeline up"


def credentials_of_other_hubs(settings: Settings, tokens: Tokens) -> list[HubCredentials]:
    """For each other hub that has a dataset of a pipeline: its URL, and the user's own token, which
    is the same for all hubs. When the receiver's public URL changes, the receiver uses the token to
    correct the URL in its webhook on the hub. Empty if the user has no token."""
    token = own_token(os.environ, tokens.hub)
    if token is None:
        return []
    return [HubCredentials(endpoint=hub, token=token) for hub in _datasets_by_hub(settings)]


def subscribe_at_other_hubs(settings: Settings, home: Home, tokens: Tokens) -> Iterator[str]:
    """Create the webhooks on the other hubs, or correct the webhooks that exist. Yields one line of
    text for each hub. The line says what the hub does now, or what the user must do. If a hub
    cannot be reached, this function raises no error, because the stack can also run without this
    hub."""
    token = own_token(os.environ, tokens.hub)
    for hub, datasets in _datasets_by_hub(settings).items():
        names = ", ".join(datasets)
        receiver = _receiver_seen_from(hub, settings, home)
        if receiver is None:
            yield (
                f"{hub} cannot reach this receiver to report pushes to {names}: set `tunnel` or "
                "`public_url` under [receiver], then start the stack again; until then, train by "
                "hand with `pipeline jobs run`"
            )
            continue
        url = receiver + ROUTE
        watch = " ".join(f"--watch dataset:{name}" for name in datasets)
        by_hand = (
            f"HF_TOKEN=… pipeline webhooks create --endpoint {hub} --url {url} {watch} "
            f"--domain repo --secret {secret_in_shell(home.tokens_file)}"
        )
        if token is None:
            yield (
                f"no token for {hub}: run `hf auth login`, or set HF_TOKEN to a token that may "
                "manage webhooks there, and start the stack again; or create the webhook by hand: "
                f"{by_hand}"
            )
            continue
        try:
            webhook_id = _subscribe(hub, token, url, datasets, tokens.webhook)
        except ReceiverError as error:
            yield (
                f"could not create or correct the webhook at {hub} for {names}: {error} To create "
                f"the webhook by hand: {by_hand}"
            )
        else:
            yield f"{hub} reports pushes to {names}: its webhook {webhook_id} posts to {url}"


def check_other_hubs(facts: Facts) -> Iterator[Finding]:
    """For `pipeline doctor`: checks whether the webhooks on the other hubs exist and are enabled.
    Yields nothing if no stack is up, if no pipeline follows a dataset on another hub, or if the
    stack's tokens cannot be read."""
    settings = facts.settings
    if facts.stack is None or facts.tokens is None:
        return
    token = own_token(os.environ, facts.tokens.hub)
    for hub, datasets in _datasets_by_hub(settings).items():
        receiver = _receiver_seen_from(hub, settings, facts.home)
        if receiver is None:
            yield wrong(
                _CHECK,
                f"{hub} cannot reach this receiver",
                "set `tunnel` or `public_url` under [receiver], then pipeline down and pipeline up",
            )
            continue
        if token is None:
            yield wrong(_CHECK, f"there is no token for {hub}", f"hf auth login, then {_RESTART}")
            continue
        try:
            ours = _find_webhook(hub, token, receiver + ROUTE)
        except ReceiverError as error:
            yield wrong(_CHECK, f"{hub} does not list its webhooks: {error}", _RESTART)
            continue
        if ours is None or "repo" not in ours.domains or unwatched_datasets(datasets, ours.watched):
            names = ", ".join(datasets)
            yield wrong(_CHECK, f"no webhook at {hub} reports pushes to {names}", _RESTART)
        elif ours.status != "enabled":
            yield wrong(
                _CHECK,
                f"{ours.id} at {hub} is {ours.status}",
                f"pipeline webhooks enable {ours.id} --endpoint {hub}",
            )
        else:
            yield ok(_CHECK, f"{ours.id} at {hub} posts to {receiver + ROUTE}")


def _datasets_by_hub(settings: Settings) -> dict[str, list[str]]:
    """URL of another hub → the datasets on that hub that pipelines follow."""
    followed: dict[str, list[str]] = {}
    for pipeline in settings.pipelines:
        hub = settings.other_hub(pipeline)
        if hub is not None and pipeline.dataset not in followed.setdefault(hub, []):
            followed[hub].append(pipeline.dataset)
    return followed


def _subscribe(hub: str, token: str, url: str, datasets: list[str], secret: str) -> str:
    """Create or correct the webhook that posts to `url`; returns the webhook's id. This webhook
    keeps what it watches, because the user may have added something. The user's other webhooks do
    not change."""
    ours = _find_webhook(hub, token, url)
    kept = () if ours is None else ours.watched
    added = (WatchedItem(type="dataset", name=name) for name in unwatched_datasets(datasets, kept))
    watched = [*kept, *added]
    if ours is None:
        created = create_webhook(
            url=url, watched=watched, domains=["repo"], secret=secret, endpoint=hub, token=token
        )
        return created.id
    update_webhook(
        ours.id,
        watched=watched,
        domains=["repo"],
        secret=secret,
        url=url,
        endpoint=hub,
        token=token,
    )
    return ours.id


def _find_webhook(hub: str, token: str, url: str) -> WebhookRecord | None:
    """The webhook on this hub that posts to `url`; None if there is none."""
    found = list_webhooks(endpoint=hub, token=token)
    return next((each for each in found if each.url == url), None)


def _receiver_seen_from(hub: str, settings: Settings, home: Home) -> str | None:
    """The URL at which this hub can reach the receiver. None if the receiver has no such URL, or if
    the receiver's tunnel has no URL yet."""
    receiver = settings.receiver
    if receiver.public_url is not None:
        return receiver.public_url.rstrip("/")
    if receiver.tunnel is not None:
        # The receiver writes the URL of its tunnel to this file before it answers any request, so
        # the file exists when the stack is up.
        try:
            urls = json.loads(remembered_urls(home.root, receiver.port).read_text())
        except (OSError, ValueError):
            return None
        return str(urls[0]) if urls else None
    return settings.receiver_url if _is_on_this_machine(hub) else None


def _is_on_this_machine(hub: str) -> bool:
    name = urlsplit(hub).hostname or ""
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"
