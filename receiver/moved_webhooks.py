"""Webhooks that point to this receiver's former public URL, moved to its present one.

The URLs are remembered on disk: a receiver that is started again may get another one.
"""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from receiver.errors import NotAllowed, ReceiverError
from receiver.webhooks import list_webhooks, update_webhook

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Hub:
    """One that keeps webhooks; by default the environment's, `HF_ENDPOINT` and `HF_TOKEN`."""

    endpoint: str | None = None
    token: str | None = field(default=None, repr=False)


def move_webhooks(url: str, remembered: Path, hubs: Sequence[Hub]) -> bool:
    """Point the webhooks at `url` that point at a URL which `remembered` lists.

    Whether that is settled; a hub that cannot be asked, and a file that cannot be used, is logged,
    and tried at the next call.
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
            "%s cannot be used (%s): webhooks that post to a former public URL are not moved yet.",
            *(remembered, error),
        )
        return False
    return True


def _move(hub: Hub, former: Sequence[str], url: str) -> bool:
    try:
        for webhook in list_webhooks(endpoint=hub.endpoint, token=hub.token):
            posts_to = webhook.url or ""
            # The longest: one URL may be the beginning of another, the present one's too.
            under = [known for known in (url, *former) if f"{posts_to}/".startswith(f"{known}/")]
            old = max(under, key=len, default=url)
            if old != url:
                moved = url + posts_to.removeprefix(old)
                update_webhook(webhook.id, url=moved, endpoint=hub.endpoint, token=hub.token)
                _logger.warning("Webhook %s now posts to %s", webhook.id, moved)
    except NotAllowed as error:
        _logger.warning(
            "Webhooks that post to %s cannot be moved, change them to %s by hand: %s",
            *(", ".join(former), url, error),
        )
        return True
    except ReceiverError as error:
        _logger.warning("Webhooks that post to %s are not moved yet: %s", ", ".join(former), error)
        return False
    return True


def _read(remembered: Path) -> list[str]:
    try:
        return [str(url) for url in json.loads(remembered.read_text())]
    except FileNotFoundError:
        return []
    except ValueError as error:
        _logger.warning(
            "%s is no list of URLs (%s) and is written anew: correct webhooks that post to a former"
            " public URL by hand.",
            *(remembered, error),
        )
        return []


def _write(remembered: Path, urls: list[str]) -> None:
    remembered.parent.mkdir(parents=True, exist_ok=True)
    draft = remembered.with_suffix(".new")
    draft.write_text(json.dumps(urls))
    draft.replace(remembered)
