"""Manages the webhooks on a hub: create, list, get, update, enable, disable, delete.

The functions work with the Hugging Face Hub and with the *embedded hub* (the hub that `pipeline up`
starts): both answer the requests that `huggingface_hub` makes. The functions never print or store a
secret.

Every function has the arguments `endpoint` (default: `HF_ENDPOINT`, or else the Hugging Face Hub)
and `token` (default: the token that `huggingface_hub` finds; False sends none). Every function may
raise:

- `ValueError`: an argument is not valid.
- `NotAllowed`: the token is missing, or the hub refuses it.
- `WebhookNotFound`: the hub has no webhook with this id.
- `WebhookApiError`: the call failed for another reason.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from receiver.errors import NotAllowed, WebhookApiError, WebhookNotFound

HUGGING_FACE = "https://huggingface.co"

WatchedType = Literal["bucket", "dataset", "model", "org", "space", "user"]
Domain = Literal["discussion", "repo"]
WebhookStatus = Literal["disabled", "enabled", "suspended"]


class WatchedItem(BaseModel):
    """A repository, or all repositories of an owner."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    type: WatchedType
    name: str = Field(min_length=1)

    def __str__(self) -> str:
        return f"{self.type}:{self.name}"

    @classmethod
    def parse(cls, text: str) -> "WatchedItem":
        """Parse `type:name`, such as `dataset:acme/answers`. Raises `ValueError` if the text has
        another form or the type is unknown."""
        type_, colon, name = text.partition(":")
        valid = ", ".join(get_args(WatchedType))
        if not colon or not name:
            raise ValueError(
                f"Expected format 'type:name' (e.g. 'model:bert-base-uncased'), got '{text}'."
                f" Valid types: {valid}"
            )
        if type_ not in get_args(WatchedType):
            raise ValueError(f"Invalid type '{type_}'. Valid types: {valid}")
        return cls.model_validate({"type": type_, "name": name})


Watched = Sequence[WatchedItem | Mapping[str, str] | str]
"""Each item is a `WatchedItem`, a mapping `{"type": …, "name": …}`, or a string `type:name`."""


class WebhookRecord(BaseModel):
    """A webhook as the hub describes it."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    id: str
    url: str | None = None
    """The URL to which the webhook posts. None for a webhook that starts a job."""
    job: dict[str, Any] | None = None
    """The hub's description of the job that the webhook starts. None for a webhook that posts to a
    URL."""
    watched: tuple[WatchedItem, ...]
    domains: tuple[Domain, ...]
    status: WebhookStatus
    """`suspended` means that the hub stopped the deliveries after many failures. Only the embedded
    hub reports `suspended`."""
    warnings: tuple[str, ...] = ()
    """Why the webhook gets no events of some watched items, for example because the repository does
    not exist. Only the embedded hub reports warnings."""
    secret: str | None = Field(default=None, repr=False)
    """The secret that the deliveries carry. Only the record that `create_webhook` returns has the
    secret; in all other records, this field is None."""


def create_webhook(
    *,
    url: str | None = None,
    job_id: str | None = None,
    watched: Watched,
    domains: Sequence[str] | None = None,
    secret: str | None = None,
    endpoint: str | None = None,
    token: str | Literal[False] | None = None,
) -> WebhookRecord:
    """Create a webhook. When a `watched` item changes, the hub posts an event to `url`, or starts a
    copy of the job `job_id`. The caller must give either `url` or `job_id`.

    `domains` lists the kinds of events: `repo`, `discussion`, or both. If `domains` is None, the
    hub uses its default. The deliveries to `url` carry `secret`, which proves that the hub sent
    them.
    """
    if url is None and job_id is None:
        raise ValueError("Missing argument for webhook: `url` or `job_id`.")
    if not watched:
        raise ValueError("A webhook needs something to watch: set `watched` to at least one item.")
    body = _body(url, job_id, watched, domains or get_args(Domain), secret)
    answer = call_hub("POST", "webhooks", endpoint, token, body)
    return _webhook(answer).model_copy(update={"secret": secret})


def list_webhooks(
    *, endpoint: str | None = None, token: str | Literal[False] | None = None
) -> tuple[WebhookRecord, ...]:
    answer = call_hub("GET", "webhooks", endpoint, token)
    if not isinstance(answer, list):
        raise WebhookApiError("The hub's answer is not a list of webhooks.")
    return tuple(_webhook({"webhook": data}) for data in answer)


def get_webhook(
    webhook_id: str, *, endpoint: str | None = None, token: str | Literal[False] | None = None
) -> WebhookRecord:
    return _webhook(call_hub("GET", f"webhooks/{webhook_id}", endpoint, token))


def update_webhook(
    webhook_id: str,
    *,
    url: str | None = None,
    job_id: str | None = None,
    watched: Watched | None = None,
    domains: Sequence[str] | None = None,
    secret: str | None = None,
    endpoint: str | None = None,
    token: str | Literal[False] | None = None,
) -> WebhookRecord:
    """Change the properties that are given. A property does not change if its argument is None."""
    if watched is None:
        # A body without the list, or with an empty list, might remove all watched items.
        watched = get_webhook(webhook_id, endpoint=endpoint, token=token).watched
    body = _body(url, job_id, watched, domains, secret)
    return _webhook(call_hub("POST", f"webhooks/{webhook_id}", endpoint, token, body))


def enable_webhook(
    webhook_id: str, *, endpoint: str | None = None, token: str | Literal[False] | None = None
) -> WebhookRecord:
    """Enable a webhook that is disabled or suspended."""
    return _webhook(call_hub("POST", f"webhooks/{webhook_id}/enable", endpoint, token))


def disable_webhook(
    webhook_id: str, *, endpoint: str | None = None, token: str | Literal[False] | None = None
) -> WebhookRecord:
    """Stop the deliveries of the webhook until it is enabled again."""
    return _webhook(call_hub("POST", f"webhooks/{webhook_id}/disable", endpoint, token))


def delete_webhook(
    webhook_id: str, *, endpoint: str | None = None, token: str | Literal[False] | None = None
) -> None:
    """Delete the webhook. This cannot be undone."""
    call_hub("DELETE", f"webhooks/{webhook_id}", endpoint, token)


def _body(
    url: str | None,
    job_id: str | None,
    watched: Watched,
    domains: Sequence[str] | None,
    secret: str | None,
) -> dict[str, Any]:
    if url is not None and job_id is not None:
        raise ValueError("Set `url` or `job_id` but not both.")
    items = [
        WatchedItem.parse(item) if isinstance(item, str) else WatchedItem.model_validate(item)
        for item in watched
    ]
    fields = {
        "watched": [item.model_dump() for item in items],
        "url": url,
        "jobSourceId": job_id,
        "domains": None if domains is None else list(domains),
        "secret": secret,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _webhook(answer: Any) -> WebhookRecord:
    try:
        data = answer["webhook"]
        status = data.get("status") or ("disabled" if data.get("disabled") else "enabled")
        return WebhookRecord.model_validate({**data, "status": status, "secret": None})
    except (AttributeError, KeyError, TypeError, ValidationError) as error:
        raise WebhookApiError(f"The hub's answer is not a webhook: {error!r}") from error


def call_hub(
    method: Literal["GET", "POST", "DELETE"],
    path: str,
    endpoint: str | None,
    token: str | Literal[False] | None,
    body: dict[str, Any] | None = None,
    query: Mapping[str, str] | None = None,
) -> Any:
    """Send a request to `/api/settings/<path>` of the hub; returns the JSON of the answer, or None
    if the answer is empty. There is no time limit.

    This function makes the requests of `huggingface_hub` itself, because the records of this
    library have no status, and because it does not know the routes that only a hotpush hub has.
    """
    from huggingface_hub import get_session
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status  # type: ignore[attr-defined]

    # Read HF_ENDPOINT at each call: huggingface_hub reads it only once, when it is imported.
    hub = (endpoint or os.environ.get("HF_ENDPOINT") or HUGGING_FACE).rstrip("/")
    with hub_errors(hub, f"{method} {path}"):
        response = get_session().request(
            method,
            f"{hub}/api/settings/{path}",
            headers=build_hf_headers(token=token),
            json=body,
            params=query,
        )
        hf_raise_for_status(response)
        if not response.content or method == "DELETE":
            return None
        try:
            return response.json()
        except ValueError as error:
            raise WebhookApiError(f"The answer of {hub} is not JSON: {error}") from error


@contextmanager
def hub_errors(hub: str, what: str) -> Iterator[None]:
    """Turn the errors of `huggingface_hub` into errors of this module. `what` says what was asked
    of the hub."""
    import httpx2
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    try:
        yield
    except HfHubHTTPError as error:
        status, reason = error.response.status_code, error.server_message or str(error)
        if status in (401, 403):
            raise NotAllowed(
                f"{hub} refused the token ({status} to {what}: {reason})."
                " Set `HF_TOKEN` to a token that may do this."
            ) from error
        kind = WebhookNotFound if status == 404 else WebhookApiError
        raise kind(f"{hub} answered {status} to {what}: {reason}") from error
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise WebhookApiError(
            f"The hub at {hub} cannot be reached ({error}). Start the hub, or correct `HF_ENDPOINT`"
            " or `endpoint`."
        ) from error
    except (OfflineModeIsEnabled, ValueError) as error:
        # `HF_HUB_OFFLINE` is set, or a name or a README is not valid. The message says so.
        raise WebhookApiError(str(error)) from error
