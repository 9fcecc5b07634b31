"""Manages the webhooks on a hub: create, list, get, update, enable, disable, delete.

The functions work with the Hugging Face Hub and with the *embedded hub* (the hub that `pipeline up`
starts): both answer the requests that `huggingface_hub` makes. The functions never print or store a
secret.

Every function has the arguments `endpoint` (default: `HF_ENDPOINT`, or else the Hugging Face Hub)
and `token` (default: the token that `huggingface_hub` finds). Every function may raise:

- `ValueError`: an argument is not valid.
- `NotAllowed`: the token is missing, or the hub refuses it.
- `WebhookNotFound`: the hub has no webhook with this id.
- `WebhookApiError`: the call failed for another reason.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from receiver.errors import NotAllowed, WebhookApiError, WebhookNotFound

if TYPE_CHECKING:
    from huggingface_hub import HfApi

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
    domains: Sequence[Domain] | None = None,
    secret: str | None = None,
    secrets: Mapping[str, str] | None = None,
    endpoint: str | None = None,
    token: str | None = None,
) -> WebhookRecord:
    """Create a webhook. When a `watched` item changes, the hub posts an event to `url`, or starts a
    copy of the job `job_id`. The caller must give either `url` or `job_id`.

    `domains` lists the kinds of events: `repo`, `discussion`, or both. If `domains` is None, the
    hub uses its default. The deliveries to `url` carry `secret`, which proves that the hub sent
    them. Each copy of the job gets `secrets` as environment variables.
    """
    _check_target(url, job_id, secrets)
    if url is None and job_id is None:
        raise ValueError("Missing argument for webhook: `url` or `job_id`.")
    items = _items(watched)
    if not items:
        raise ValueError("A webhook needs something to watch: set `watched` to at least one item.")
    with _as_webhook_errors():
        created = _api(endpoint, token).create_webhook(
            url=url,
            job_id=job_id,
            watched=_as_dicts(items),
            domains=None if domains is None else list(domains),
            secret=secret,
            secrets=None if secrets is None else dict(secrets),
        )
    found = get_webhook(created.id, endpoint=endpoint, token=token)
    return found.model_copy(update={"secret": created.secret or secret})


def list_webhooks(
    *, endpoint: str | None = None, token: str | None = None
) -> tuple[WebhookRecord, ...]:
    answer = _read("", endpoint, token)
    if not isinstance(answer, list):
        raise WebhookApiError("The hub's answer is not a list of webhooks.")
    return tuple(_webhook(data) for data in answer)


def get_webhook(
    webhook_id: str, *, endpoint: str | None = None, token: str | None = None
) -> WebhookRecord:
    answer = _read(f"/{webhook_id}", endpoint, token, webhook_id)
    return _webhook(answer.get("webhook") if isinstance(answer, Mapping) else None)


def update_webhook(
    webhook_id: str,
    *,
    url: str | None = None,
    job_id: str | None = None,
    watched: Watched | None = None,
    domains: Sequence[Domain] | None = None,
    secret: str | None = None,
    secrets: Mapping[str, str] | None = None,
    endpoint: str | None = None,
    token: str | None = None,
) -> WebhookRecord:
    """Change the properties that are given. A property does not change if its argument is None."""
    _check_target(url, job_id, secrets)
    # If `watched` is None, send the present list. For None, huggingface_hub would send an empty
    # list, and a hub might then remove all watched items.
    items = (
        get_webhook(webhook_id, endpoint=endpoint, token=token).watched
        if watched is None
        else _items(watched)
    )
    return _changed(
        lambda api: api.update_webhook(
            webhook_id,
            url=url,
            job_id=job_id,
            watched=_as_dicts(items),
            domains=None if domains is None else list(domains),
            secret=secret,
            secrets=None if secrets is None else dict(secrets),
        ),
        webhook_id,
        endpoint,
        token,
    )


def enable_webhook(
    webhook_id: str, *, endpoint: str | None = None, token: str | None = None
) -> WebhookRecord:
    """Enable a webhook that is disabled or suspended."""
    return _changed(lambda api: api.enable_webhook(webhook_id), webhook_id, endpoint, token)


def disable_webhook(
    webhook_id: str, *, endpoint: str | None = None, token: str | None = None
) -> WebhookRecord:
    """Stop the deliveries of the webhook until it is enabled again."""
    return _changed(lambda api: api.disable_webhook(webhook_id), webhook_id, endpoint, token)


def delete_webhook(
    webhook_id: str, *, endpoint: str | None = None, token: str | None = None
) -> None:
    """Delete the webhook. This cannot be undone."""
    with _as_webhook_errors(webhook_id):
        _api(endpoint, token).delete_webhook(webhook_id)


def _changed(
    change: Callable[["HfApi"], object], webhook_id: str, endpoint: str | None, token: str | None
) -> WebhookRecord:
    with _as_webhook_errors(webhook_id):
        change(_api(endpoint, token))
    return get_webhook(webhook_id, endpoint=endpoint, token=token)


def _api(endpoint: str | None, token: str | None) -> "HfApi":
    from huggingface_hub import HfApi

    # Read HF_ENDPOINT at each call: huggingface_hub reads it only once, when it is imported.
    return HfApi(endpoint=endpoint or os.environ.get("HF_ENDPOINT"), token=token)


def _read(path: str, endpoint: str | None, token: str | None, webhook_id: str | None = None) -> Any:
    """The JSON of the hub's answer to `GET /api/settings/webhooks<path>`. This function makes the
    request itself, because the records of huggingface_hub have no field for a webhook's status."""
    from huggingface_hub import get_session
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status  # type: ignore[attr-defined]

    with _as_webhook_errors(webhook_id):
        response = get_session().get(
            f"{_api(endpoint, token).endpoint}/api/settings/webhooks{path}",
            headers=build_hf_headers(token=token),
        )
        hf_raise_for_status(response)
        return response.json()


def _webhook(data: Any) -> WebhookRecord:
    if not isinstance(data, Mapping):
        raise WebhookApiError("The hub's answer is not a webhook.")
    status = data.get("status") or ("disabled" if data.get("disabled") else "enabled")
    try:
        return WebhookRecord.model_validate({**data, "status": status, "secret": None})
    except ValidationError as error:
        raise WebhookApiError(f"The hub's answer is not a webhook: {error}") from error


def _check_target(url: str | None, job_id: str | None, secrets: Mapping[str, str] | None) -> None:
    if url is not None and job_id is not None:
        raise ValueError("Set `url` or `job_id` but not both.")
    if secrets is not None and job_id is None:
        raise ValueError("`secrets` can only be set together with `job_id`.")


def _items(watched: Watched) -> tuple[WatchedItem, ...]:
    return tuple(
        WatchedItem.parse(item) if isinstance(item, str) else WatchedItem.model_validate(item)
        for item in watched
    )


def _as_dicts(items: Sequence[WatchedItem]) -> list[Any]:
    return [item.model_dump() for item in items]


@contextmanager
def _as_webhook_errors(webhook_id: str | None = None) -> Iterator[None]:
    import httpx2
    from huggingface_hub.errors import (
        HfHubHTTPError,
        LocalTokenNotFoundError,
        OfflineModeIsEnabled,
    )

    try:
        yield
    except LocalTokenNotFoundError as error:
        raise NotAllowed("There is no token: set `HF_TOKEN`, or pass `token`.") from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403):
            reason = error.server_message or "the hub gave no reason"
            raise NotAllowed(
                f"The hub refused the token ({status}: {reason})."
                " Set `HF_TOKEN` to a token that may manage webhooks."
            ) from error
        if status == 404 and webhook_id is not None:
            raise WebhookNotFound(
                f"There is no webhook {webhook_id!r}; `pipeline webhooks ls` lists all webhooks."
            ) from error
        raise WebhookApiError(
            f"The hub answered {status}: {error.server_message or str(error)}"
        ) from error
    except httpx2.HTTPError as error:
        url = error.request.url
        raise WebhookApiError(
            f"The hub at {url.scheme}://{url.netloc.decode()} cannot be reached ({error})."
            " Start the hub, or pass another `endpoint`."
        ) from error
    except OfflineModeIsEnabled as error:  # `HF_HUB_OFFLINE` is set, and the message says so
        raise WebhookApiError(str(error)) from error
    except httpx2.InvalidURL as error:
        raise WebhookApiError(
            f"The hub's URL is not valid ({error})."
            " Correct `HF_ENDPOINT`, or pass another `endpoint`."
        ) from error
    except (AttributeError, KeyError, TypeError) as error:
        # huggingface_hub reads the fields of the answer without checking that they exist.
        raise WebhookApiError(f"The hub's answer is not a webhook: {error!r}") from error
    except ValueError as error:
        # The functions check their arguments before they call the hub. So this error comes from the
        # hub's answer.
        raise WebhookApiError(f"The hub's answer is not JSON: {error}") from error
