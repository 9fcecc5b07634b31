"""Updates webhooks on hubs when the public URL of this receiver has changed.

A receiver may get another URL each time it starts. So its former URLs are stored in a file, where
the receiver finds them after a restart.
"""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jobs.folder import write_atomically
from receiver.errors import NotAllowed, ReceiverError
from receiver.webhooks import list_webhooks, update_webhook

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class HubCredentials:
    """A hub, and a token that may manage webhooks on this hub. If `endpoint` (the hub's URL) is
    None, the hub is the one in `HF_ENDPOINT` or, if this variable is not set, the Hugging Face Hub.
    If `token` is None, the token that `huggingface_hub` finds is used, such as the token in
    `HF_TOKEN`."""

    endpoint: str | None = None
    token: str | None = field(default=None, repr=False)


def move_webhooks(url: str, remembered: Path, hubs: Sequence[HubCredentials]) -> bool:
    """Change the webhooks on `hubs` that post to a former URL, so that they post to `url`. The file
    `remembered` lists the former URLs.

    Returns True if nothing is left to do. Returns False if a hub failed or the file could not be
    used. The caller must then call this function again later. If a hub refuses the token, another
    call would not help. So this hub counts as done, and the log asks the user to change the
    webhooks of this hub by hand.
    """
    try:
        former = [known for known in _read(remembered) if known != url]
        _write(remembered, [url, *former])
        if not former:
            return True
        are_moved = [_move(hub, former, url) for hub in hubs]
        if not all(are_moved):
            return False
        _write(remembered, [url])
    except OSError as error:
        _logger.warning(
            "%s cannot be used (%s): webhooks that post to a former URL are not updated yet.",
            *(remembered, error),
        )
        return False
    return True


def _move(hub: HubCredentials, former: Sequence[str], url: str) -> bool:
    try:
        for webhook in list_webhooks(endpoint=hub.endpoint, token=hub.token):
            posts_to = webhook.url or ""
            # One known URL may be a prefix of another known URL, so take the longest URL that
            # matches. If the longest one is the new URL, the webhook already posts to the new URL.
            matching = [each for each in (url, *former) if f"{posts_to}/".startswith(f"{each}/")]
            old = max(matching, key=len, default=url)
            if old != url:
                moved = url + posts_to.removeprefix(old)
                update_webhook(webhook.id, url=moved, endpoint=hub.endpoint, token=hub.token)
                _logger.warning("Webhook %s now posts to %s", webhook.id, moved)
    except NotAllowed as error:
        _logger.warning(
            "Webhooks that post to %s cannot be updated; change their URL to %s by hand: %s",
            *(", ".join(former), url, error),
        )
        return True
    except ReceiverError as error:
        _logger.warning(
            "Webhooks that post to %s are not updated yet: %s", ", ".join(former), error
        )
        return False
    return True


def _read(remembered: Path) -> list[str]:
    try:
        known = json.loads(remembered.read_text())
        if not isinstance(known, list):
            raise ValueError("it has no JSON list")
    except FileNotFoundError:
        return []
    except ValueError as error:
        _logger.warning(
            "%s is not a list of URLs (%s), so the file is overwritten. If the public URL has"
            " changed, change the webhooks that post to a former URL by hand.",
            *(remembered, error),
        )
        return []
    return [str(url) for url in known]


def _write(remembered: Path, urls: list[str]) -> None:
    remembered.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(remembered, json.dumps(urls))
