"""Sends the deliveries that `webhooks.py` stores. For each webhook, one task sends the head of its
queue, so a slow receiver delays only its own deliveries.

A delivery is posted to the webhook's URL, with the headers of https://www.standardwebhooks.com and
of the Hugging Face Hub. The host is resolved once per attempt, and the connection goes to exactly
the address that was checked. So it does not matter if the name gets another address after the
check. Link-local, multicast and metadata addresses are refused: a metadata service gives the
credentials of this machine to every process on it. Addresses of loopback and of private networks
are allowed, because the receivers are usually there.

A webhook may start a job instead: then a copy of the webhook's job is submitted, with the payload
in its environment.
"""

import asyncio
import contextlib
import ipaddress
import json
import logging
import socket
import ssl
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache, partial
from typing import Any, TypeVar

import httpx
from prometheus_client import CollectorRegistry, Counter, Histogram

from jobs.errors import JobError
from jobs.job import Delivery
from jobs.spec import JobSpec, RevisionRange
from jobs.store import JobStore
from pipeline.hub import webhooks
from pipeline.hub.database import Database
from pipeline.hub.errors import HubError
from pipeline.hub.settings import HubSettings
from pipeline.hub.webhooks import Attempt, Due, StoredWebhook
from receiver.payload import PING, WebhookPayload
from receiver.verify import is_signing_secret, signer
from receiver.webhooks import WebhookStatus

logger = logging.getLogger(__name__)

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

# Addresses of cloud metadata services that are not link-local.
_METADATA = frozenset(
    ipaddress.ip_address(text)
    for text in (
        "fd00:ec2::254",  # Amazon
        "fd00:ec2::23",  # Amazon, for pods of EKS
        "fd20:ce::254",  # Google
        "100.100.100.200",  # Alibaba
        "168.63.129.16",  # Azure
        "192.0.0.192",  # Oracle
    )
)
# Names are looked up in separate threads, because a name server that does not answer blocks a
# thread for half a minute.
_resolvers = ThreadPoolExecutor(64, thread_name_prefix="resolve")
_NAT64 = (ipaddress.IPv6Network("64:ff9b::/96"), ipaddress.IPv6Network("64:ff9b:1::/48"))


def is_forbidden(address: Address) -> bool:
    """Whether no webhook may call this address. An IPv6 address is also forbidden if it contains
    a forbidden IPv4 address."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
        if any(address in network for network in _NAT64):
            inner.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
        if any(each is not None and is_forbidden(each) for each in inner):
            return True
        # Remove the zone (`%eth0`): an address with a zone equals none in `_METADATA`.
        address = ipaddress.IPv6Address(int(address))
    return address.is_link_local or address.is_multicast or address in _METADATA


async def resolve(host: str, port: int) -> tuple[Address, ...]:
    """All addresses of `host`, which may also be an address, in the order in which to try them.

    Raises HubError if `host` has no address, or if any of its addresses is forbidden. A name
    that has a forbidden address cannot be trusted, even if its other addresses are allowed.
    """
    look_up = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    try:
        answers = await asyncio.get_running_loop().run_in_executor(_resolvers, look_up)
    except (OSError, UnicodeError) as error:
        raise HubError(f"{host!r} has no address ({error}): check the URL.") from None
    found = tuple(ipaddress.ip_address(answer[4][0]) for answer in answers)
    for address in found:
        if is_forbidden(address):
            leads = "is" if host == str(address) else f"leads to {address},"
            raise HubError(
                f"{host} {leads} a link-local, multicast or metadata address: no webhook may call "
                "it. Give the webhook another URL."
            )
    return found


async def post(due: Due, url: str, secret: str | None, *, timeout_seconds: float) -> dict[str, Any]:
    """Posts the delivery. Returns how this ended, as fields of an `Attempt`. Raises HubError if no
    webhook may call the host."""
    try:
        async with asyncio.timeout(timeout_seconds):
            return await _answer(due, httpx.URL(url), secret)
    except TimeoutError:
        return {"error": f"no answer within {timeout_seconds:g} s"}
    except (httpx.HTTPError, httpx.InvalidURL) as failure:
        return {"error": str(failure) or type(failure).__name__}


async def _answer(due: Due, target: httpx.URL, secret: str | None) -> dict[str, Any]:
    """Tries the addresses of the host in order, and posts the delivery to the first one that
    accepts a connection."""
    port = target.port or (443 if target.scheme == "https" else 80)
    error, is_refused = "", True
    # The URLs for httpx have the address, not the host's name. A client of its own for each
    # delivery keeps httpx from using an open connection again for another host at the same address,
    # whose certificate nobody has checked. `trust_env=False`: a proxy from the environment would
    # also get the requests to receivers on this machine.
    async with httpx.AsyncClient(verify=_certificates(), trust_env=False, timeout=None) as client:
        for address in await resolve(target.host, port):
            # The URL has the address; the host's name is in the header `Host` and in TLS.
            named = {"Host": target.netloc.decode("ascii")}
            is_private = target.scheme == "https" or address.is_loopback
            request = client.build_request(
                "POST",
                target.copy_with(host=str(address)),
                content=due.payload.encode(),
                headers=named | headers(due, secret, is_private),
                extensions={"sni_hostname": target.raw_host.decode("ascii")},
            )
            try:
                response = await client.send(request, stream=True)
            except httpx.ConnectError as failure:
                error = str(failure)
                is_refused = is_refused and address.is_loopback and _is_refusal(failure)
                continue
            async with aclosing(response):
                return {
                    "response_status": response.status_code,
                    "response_head": await _beginning(response),
                }
    return {"error": error or "ConnectError", "refused": is_refused}


def _is_refusal(failure: httpx.ConnectError) -> bool:
    """Whether no program listens at the address. False if a program listens, and only the TLS
    handshake failed, for example because nobody trusts its certificate. httpx raises the same class
    of error in both cases."""
    cause: BaseException | None = failure
    while cause is not None and not isinstance(cause, ConnectionRefusedError):
        cause = cause.__cause__ or cause.__context__
    return cause is not None


@cache
def _certificates() -> ssl.SSLContext:
    return httpx.create_ssl_context()


def headers(due: Due, secret: str | None, is_private: bool) -> dict[str, str]:
    """The headers of a delivery. `Webhook-Id` is the same in all retries and replays. Only a forced
    replay has a new id.

    The key of the signature is the base64 part of a secret `whsec_…`, or the bytes of any other
    secret. The header `X-Webhook-Secret` has the secret itself, as on the Hugging Face Hub, because
    a receiver may compare it. But a `whsec_` secret is made only for signing. It is left out if
    `is_private` is false, because somebody could then read it on its way.
    """
    now = datetime.now(UTC)
    found = {
        "Content-Type": "application/json",
        "User-Agent": "hotpush-hub",
        "Webhook-Id": due.id,
        "webhook-timestamp": str(int(now.timestamp())),
    }
    if due.replay_of is not None:
        found["Webhook-Replay-Of"] = due.replay_of
    if secret is not None:
        found["webhook-signature"] = signer(secret).sign(due.id, now, due.payload)
        if is_private or not is_signing_secret(secret):
            found["X-Webhook-Secret"] = secret
    return found


async def _beginning(response: httpx.Response) -> str:
    """The first `ANSWER_CHARACTERS` characters of the answer. The rest is not read."""
    body = b""
    async for chunk in response.aiter_bytes():
        body += chunk
        if len(body) >= webhooks.ANSWER_CHARACTERS:
            break
    # Postgres stores no NUL.
    return body.decode(errors="replace").replace("\0", "\ufffd")[: webhooks.ANSWER_CHARACTERS]


def start_copy(store: JobStore, due: Due, webhook: StoredWebhook) -> dict[str, Any]:
    """Submits a copy of the webhook's job. The result looks like that of `post`: 202 with the id of
    the copy. For a repeated delivery, this is the id of the copy that was submitted first. Raises
    JobError."""
    assert webhook.job_id is not None
    source = store.get(webhook.job_id).spec
    payload = WebhookPayload.model_validate_json(due.payload)
    answer: dict[str, object] = {"pong": True}
    if payload.event.scope != PING:
        copy = source.model_copy(
            update={
                # The runner has the hub's key, and decrypts this when it starts the copy.
                "sealed_env": webhook.encrypted_secret,
                "revisions": _revisions(source, payload),
                "labels": {**source.labels, "webhook": webhook.id, "copy-of": webhook.job_id},
            }
        )
        # The store recognises a repeated delivery by its id. A forced replay has a new id, so it
        # starts another job.
        delivery = Delivery(source=f"webhook/{webhook.id}", id=due.id)
        job = store.submit(copy, payload=json.loads(due.payload), delivery=delivery)
        answer = {"job": job.id}
    return {"response_status": 202, "response_head": json.dumps(answer)}


def _revisions(source: JobSpec, payload: WebhookPayload) -> RevisionRange | None:
    """The commits that the copy is for. None if the source is not for commits of a ref, or if the
    delivery is not about new commits of this ref."""
    if source.revisions is None:
        return None
    for update in payload.updatedRefs or ():
        if update.ref == source.revisions.ref and update.newSha is not None:
            return RevisionRange(
                repo=payload.repo.name,
                ref=update.ref,
                old_sha=update.oldSha,
                new_sha=update.newSha,
            )
    return None


class HubMetrics:
    """The metrics of a hub. Each has a registry of its own, so that two hubs in one process do not
    mix their metrics."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.deliveries = Counter(
            "hub_delivery_attempts",
            "Attempts to deliver by result",
            ["result"],
            registry=self.registry,
        )
        self.worker_failures = Counter(
            "hub_worker_failures",
            "Unexpected errors of the deliverer by worker (dispatcher, webhook, attempt); "
            "deliveries went on after each error",
            ["worker"],
            registry=self.registry,
        )
        self.delivery_seconds = Histogram(
            "hub_delivery_seconds",
            "Seconds from the event, or from a replay, to the 2xx answer",
            buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5, 30, 300, 3600),
            registry=self.registry,
        )


BROKEN_OFF_SECONDS = 1.0

_STATUS_CHANGE_LOGS: dict[WebhookStatus, str] = {
    "suspended": "webhook %s to %s is SUSPENDED, because its oldest delivery fails again and "
    "again, and the others wait. `pipeline webhooks enable` tries it at once.",
    "enabled": "webhook %s to %s answers again: its suspension is over, and the deliveries that "
    "waited are sent now.",
    "disabled": "webhook %s to %s is DISABLED, because the receiver answered 410 (gone). "
    "`pipeline webhooks enable` enables it again.",
}

Answer = TypeVar("Answer")


@dataclass
class Deliverer:
    database: Database
    settings: HubSettings
    secret_key: bytes
    metrics: HubMetrics
    jobs_store: JobStore
    _more: asyncio.Event = field(default_factory=asyncio.Event)
    _sending: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    """By the webhook's id: the task that sends the head of its queue."""

    async def run(self) -> None:
        """Sends deliveries until it is cancelled, first those that an earlier run of the hub left
        pending. Looks for new ones after each write into the database. A cancellation breaks off
        the unfinished attempts. The states of their deliveries do not change, so the next run of
        the hub sends these deliveries again."""
        loop = asyncio.get_running_loop()
        self.database.after_write = lambda: loop.call_soon_threadsafe(self._more.set)
        try:
            await self._dispatch()
        finally:
            self.database.after_write = lambda: None
            for task in self._sending.values():
                task.cancel()
            await asyncio.gather(*self._sending.values(), return_exceptions=True)

    async def _dispatch(self) -> None:
        """Starts a task for each head that is due, then waits until another one is."""
        while True:
            self._more.clear()
            # Taken before the queues are read: what is read about a head that is being sent may be
            # out of date. When its task ends, it sets `_more`.
            busy = set(self._sending)
            queues = await self._until_it_works("dispatcher", lambda: self._read(webhooks.queues))
            waits = {id: at - time.time() for id, at in queues.items() if id not in busy}
            for webhook_id, seconds in waits.items():
                if seconds <= 0:
                    task = asyncio.create_task(self._send_head(webhook_id))
                    self._sending[webhook_id] = task
            later = min((seconds for seconds in waits.values() if seconds > 0), default=None)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(later):
                    await self._more.wait()

    async def _send_head(self, webhook_id: str) -> None:
        try:
            found = await self._until_it_works(
                "webhook", lambda: self._read(webhooks.oldest_pending, webhook_id)
            )
            if found is not None:
                attempt = await self._attempt(*found)
                # Apart from the attempt, which must not be repeated each second.
                await self._until_it_works("webhook", lambda: self._settle(*found, attempt))
        finally:
            del self._sending[webhook_id]
            self._more.set()

    async def _until_it_works(self, worker: str, act: Callable[[], Answer]) -> Answer:
        """Calls `act` in a thread, and after an error calls it again. The disk may be full, the
        database may be locked or damaged, or the hub has an error. The deliveries are still stored,
        so they must go on after any error; otherwise they would wait for a restart of the hub."""
        while True:
            try:
                return await asyncio.to_thread(act)
            except Exception:
                self.metrics.worker_failures.labels(worker=worker).inc()
                logger.exception(
                    "%s: an error stopped the deliveries; they go on in %g s",
                    *(worker, BROKEN_OFF_SECONDS),
                )
                await asyncio.sleep(BROKEN_OFF_SECONDS)

    def _read(self, query: Callable[..., Answer], *arguments: object) -> Answer:
        with self.database.read() as connection:
            return query(connection, *arguments)

    def _settle(self, due: Due, webhook: StoredWebhook, attempt: Attempt) -> None:
        with self.database.write() as connection:
            status, change = webhooks.settle(connection, due, webhook, attempt, self.settings)
        # Not by the status alone: a delivery that was taken is pending if a person replayed it
        # during the attempt.
        result = "delivered" if attempt.succeeded else "failed" if status == "pending" else "dead"
        self.metrics.deliveries.labels(result=result).inc()
        if change is not None:
            level = logging.INFO if change == "enabled" else logging.ERROR
            logger.log(level, _STATUS_CHANGE_LOGS[change], webhook.id, webhook.target)
        if attempt.refused:
            return  # the receiver is starting; every half second would be too many lines
        if attempt.succeeded:
            self.metrics.delivery_seconds.observe(time.time() - due.queued_at)
        logger.log(
            logging.INFO if attempt.succeeded else logging.WARNING,
            "delivery %s to %s: %s (attempt %d, now %s)",
            *(due.id, webhook.target, attempt.error or f"answered {attempt.response_status}"),
            *(due.attempt + 1, status),
            extra={"delivery_id": due.id},
        )

    async def _attempt(self, due: Due, webhook: StoredWebhook) -> Attempt:
        """Makes one attempt. Never raises: any error becomes the `error` of the attempt."""
        started_at, clock = time.time(), time.perf_counter()
        try:
            secret = webhook.secret(self.secret_key)
            if webhook.url is not None:
                timeout_seconds = self.settings.delivery_timeout_seconds
                ending = await post(due, webhook.url, secret, timeout_seconds=timeout_seconds)
            else:
                ending = await asyncio.to_thread(start_copy, self.jobs_store, due, webhook)
        except (HubError, JobError) as failure:
            ending = {"error": str(failure)}
        except Exception as failure:
            # The hub has an error. If this raised the error, the attempt would have no end.
            self.metrics.worker_failures.labels(worker="attempt").inc()
            logger.exception(
                "delivery %s to %s: the hub failed",
                *(due.id, webhook.target),
                extra={"delivery_id": due.id},
            )
            name = type(failure).__name__
            ending = {"error": f"the hub failed ({name}); its log says where"}
        milliseconds = 1000 * (time.perf_counter() - clock)
        return Attempt(started_at=started_at, milliseconds=milliseconds, **ending)
