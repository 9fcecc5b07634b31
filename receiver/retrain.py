"""Retrains pipelines when their datasets change: decides which pipelines an event retrains, makes
the spec of each job (`JobSpec`), and submits the jobs together with the delivery.

There is a job for each push to a ref of a dataset (normally a branch) that a pipeline follows. All
other events are ignored, and the answer says why.
"""

import asyncio
import itertools
import logging
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jobs.job import Delivery, JobRequest
from jobs.spec import DEFAULT_BRANCH, JobSpec, RevisionRange, is_git_url
from jobs.store import JobStore
from receiver.payload import UpdatedRef, WebhookPayload

if TYPE_CHECKING:
    from fastapi import Request

logger = logging.getLogger(__name__)

Answer = dict[str, str | list[str]]

_GIT_URL = re.compile(r"(?:\w+://)?(?:[^/@]*@)?([^/:]+)(?::\d+(?=/))?[/:]+(\S+)")
"""Matches `https://host/path`, `ssh://user@host:port/path` and `user@host:path`."""
_SHA = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")


@dataclass(frozen=True, kw_only=True)
class RetrainRule:
    """Says that a pipeline follows `dataset`: each push to `ref` retrains the pipeline."""

    spec: JobSpec
    """The spec of the pipeline's jobs, without their commits. A pipeline has only one rule."""
    dataset: str
    """The dataset: `owner/name` on a hub, or the git URL of a repository elsewhere."""
    endpoint: str | None = None
    """The URL of the hub that has the dataset. None for a dataset on the stack's own hub (the hub
    that `pipeline up` starts), or if `dataset` is a git URL."""
    ref: str = DEFAULT_BRANCH
    """The full name of the ref that the pipeline follows."""

    def watches(self, payload: WebhookPayload) -> bool:
        """Whether the payload's repository has the name or the git URL of this rule's dataset.

        The comparison ignores case, because a hub finds a repository by its name in upper or lower
        case.
        """
        if not is_git_url(self.dataset):
            return payload.repo.name.lower() == self.dataset.lower()
        return _host_and_path(self.dataset) in map(_host_and_path, _urls(payload))


def retrain_handler(
    store: JobStore, rules: Sequence[RetrainRule]
) -> "Callable[[WebhookPayload, Request], Awaitable[Answer]]":
    """A handler for `WebhooksServer.add_webhook("/retrain", knows_repeats=True)`. The argument
    `knows_repeats` says that the handler itself recognises repeated deliveries.

    The handler answers `{"job": id}` after the job and the delivery were stored. If several
    pipelines follow the ref, the answer also has `"jobs"`, a list of the ids of all their jobs. If
    an event needs no job, the answer is `{"ignored": reason}`.

    A job trains on the head of the ref when it starts, and not on the commit of the event. So it
    does not matter in which order deliveries arrive, or whether some are lost. If a sender repeats
    a delivery, the answer names the job that is recorded for it. But if this job failed or was
    cancelled, the delivery is handled like a new one.
    """
    # Not above, because commands that only need the rules start faster without them.
    import anyio
    import anyio.to_thread
    from fastapi import Request

    arrived: list[tuple[list[JobRequest], asyncio.Future[list[str]]]] = []
    writing = anyio.Lock()

    async def submit(requests: list[JobRequest]) -> list[str]:
        """Returns the ids of the jobs."""
        ids: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()
        arrived.append((requests, ids))
        # Only one transaction runs at a time. The first event that gets the lock stores all events
        # that have arrived meanwhile, so that they wait for the disk only once.
        async with writing:
            # An event that was stored meanwhile stores no other: those that come one by one behind
            # it would then be stored one by one.
            if not ids.done():
                batch, arrived[:] = arrived[:], []
                try:
                    asked = [one for requests, _ in batch for one in requests]
                    stored = iter(await anyio.to_thread.run_sync(store.submit_all, asked))
                except Exception as error:
                    for _, waiting in batch:
                        waiting.set_exception(error)
                else:
                    for requests, waiting in batch:
                        waiting.set_result([next(stored).id for _ in requests])
        return await ids

    async def retrain(payload: WebhookPayload, request: Request) -> Answer:
        delivery_id = request.state.delivery_id
        extra = {"delivery_id": delivery_id}
        specs = decide(payload, rules)
        if isinstance(specs, str):
            logger.info("delivery %s: %s", delivery_id, specs, extra=extra)
            return {"ignored": specs}
        # The source of each delivery contains the pipeline's name. Without this name, all requests
        # of one event would have the same source and the same delivery id. The store would then
        # take the second request for a repeat of the first.
        webhook, body = _storable(payload.webhook.id), await request.json()
        ids = await submit(
            [
                JobRequest(
                    spec=spec,
                    payload=body,
                    delivery=Delivery(source=f"{webhook}/{spec.pipeline}", id=delivery_id),
                )
                for spec in specs
            ]
        )
        logger.info("delivery %s: job %s", delivery_id, ids[0], extra=extra | {"job_id": ids[0]})
        return {"job": ids[0]} if len(ids) == 1 else {"job": ids[0], "jobs": ids}

    return retrain


def _storable(text: str) -> str:
    """The text, escaped to ASCII and cut to 200 characters. Without the escapes, databases would
    refuse some characters, such as NUL and lone surrogates."""
    return ascii(text)[1:-1][:200]


# Which pipelines an event retrains


def decide(payload: WebhookPayload, rules: Sequence[RetrainRule]) -> tuple[JobSpec, ...] | str:
    """The specs of the jobs for the event: one for each rule whose dataset is the event's
    repository, and whose ref the event has moved to another commit. Each spec has the commit that
    the event announced. If the event needs no job, returns the reason."""
    reason = _why_not_about_content(payload)
    if reason is not None:
        return reason
    endpoints = {rule.endpoint for rule in rules if rule.endpoint is not None}
    # One endpoint may be the beginning of another, so the longest one that fits is right.
    sender = max((each for each in endpoints if _is_at(each, payload)), key=len, default=None)
    named = [rule for rule in rules if rule.watches(payload)]
    # Two hubs may have datasets of the same name, so compare the hubs too. For a rule with a git
    # URL, `watches` has already compared the host, which is a part of the URL.
    watching = [rule for rule in named if rule.endpoint == sender or is_git_url(rule.dataset)]
    if not watching:
        return _why_not_followed(payload, named)
    updates = _updated_refs(payload)
    if not updates:
        return "no ref changed"

    specs = []
    reasons = []
    for rule, update in itertools.product(watching, updates):
        reason = _why_not_retrained(update, rule)
        if reason is not None:
            reasons.append(reason)
        else:
            revisions = RevisionRange(
                repo=rule.dataset, ref=rule.ref, old_sha=update.oldSha, new_sha=update.newSha
            )
            specs.append(rule.spec.model_copy(update={"revisions": revisions}))
    return tuple(specs) or "; ".join(dict.fromkeys(reasons))


def _urls(payload: WebhookPayload) -> list[str]:
    return [url for url in (payload.repo.url.web, payload.repo.url.api) if url is not None]


def _is_at(endpoint: str, payload: WebhookPayload) -> bool:
    """Whether the URLs in the payload belong to the hub at `endpoint`."""
    beginning = f"{_bare_url(endpoint)}/"
    return any(_bare_url(url).startswith(beginning) for url in _urls(payload))


def _why_not_followed(payload: WebhookPayload, named: Sequence[RetrainRule]) -> str:
    reason = f"no pipeline follows the dataset {_quoted(payload.repo.name)}"
    if not named:
        return reason
    where = ", ".join(
        f"{rule.spec.pipeline} (at {rule.endpoint or 'the hub of the stack'})" for rule in named
    )
    url = _quoted(payload.repo.url.web)
    return f"{reason} at {url}; a dataset of the same name is followed by {where}"


def _why_not_about_content(payload: WebhookPayload) -> str | None:
    event, repo = payload.event, payload.repo
    if repo.type != "dataset":
        return f"not a dataset: {_quoted(repo.name)} is a {repo.type}"
    if event.action != "update":
        return f"not an update: the action is {event.action}"
    # The scope `repo` and all scopes below it are about content, except `repo.config` and the
    # scopes below `repo.config`.
    scope = event.scope.split(".")
    if scope[0] != "repo" or scope[1:2] == ["config"]:
        return f"not about content: the scope is {_quoted(event.scope)}"
    return None


def _updated_refs(payload: WebhookPayload) -> tuple[UpdatedRef, ...]:
    if payload.updatedRefs is not None:
        return payload.updatedRefs
    if payload.repo.headSha is None:
        return ()
    # Some senders do not send `updatedRefs`. Then the event names only one commit: the head of the
    # default branch. The event does not say what this branch is called, so assume `main`.
    return (UpdatedRef(ref=DEFAULT_BRANCH, newSha=payload.repo.headSha),)


def _why_not_retrained(update: UpdatedRef, rule: RetrainRule) -> str | None:
    """The reason why this change of a ref does not retrain the rule's pipeline. None if the change
    retrains the pipeline."""
    name = _quoted(update.ref)
    if update.ref != rule.ref:
        if update.ref.startswith("refs/tags/"):
            return f"{name} is a tag"
        if update.ref.startswith("refs/pr/"):
            return f"{name} is a pull request"
        return f"{name} is not {rule.ref}, the ref that {rule.spec.pipeline} follows"
    if update.newSha is None:
        return f"{name} was deleted"
    if not _SHA.fullmatch(update.newSha):
        return f"{_quoted(update.newSha)} is not a commit id"
    if update.newSha == update.oldSha:
        return f"{name} did not change"
    return None


def _bare_url(url: str) -> str:
    return url.rstrip("/").removesuffix(".git").lower()


def _host_and_path(url: str) -> tuple[str, ...]:
    """The host and path of a git URL, in lower case, without user, port and the ending `.git`. A
    rule may have the SSH URL of a repository, but senders send its HTTPS URL."""
    found = _GIT_URL.fullmatch(_bare_url(url))
    return (url,) if found is None else found.groups()


def _quoted(value: str) -> str:
    """The value in quotes, with control characters escaped, cut to 200 characters."""
    return repr(value if len(value) <= 200 else value[:200] + "…")
