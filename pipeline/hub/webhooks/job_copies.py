"""Delivers to a webhook that starts a job instead of calling a URL: submits a copy of the webhook's
job, with the payload in the environment of the copy."""

import json
import time

from jobs.errors import JobError
from jobs.sealed import seal, unseal
from jobs.spec import JobSpec, RevisionRange
from jobs.store import Delivery, JobStore
from pipeline.hub.cipher import Cipher
from pipeline.hub.errors import HubError
from pipeline.hub.webhooks.outbox import Attempt, Due
from pipeline.hub.webhooks.store import StoredWebhook, variables_of
from receiver.payload import PING, WebhookPayload


class JobLauncher:
    """`secret_key` is the Fernet key of the hub. The runner that starts the copies has the same
    key, so it can decrypt their secrets."""

    def __init__(self, store: JobStore, secret_key: bytes) -> None:
        self._store = store
        self._secret_key = secret_key

    def describe(self, job_id: str) -> dict[str, object]:
        """Describes the job to copy, in the form that `huggingface_hub` parses. Raises
        JobNotFound."""
        spec = self._store.get(job_id).spec
        return {
            "sourceId": job_id,
            "command": list(spec.command),
            "environment": spec.env,
            "labels": spec.labels,
            "timeout": spec.resources.timeout_seconds,
        }

    def launch(self, due: Due, webhook: StoredWebhook, cipher: Cipher) -> Attempt:
        """Submits the copy. The result looks like an answer of a receiver: 202 with the copy's id.
        For a repeated delivery, this is the id of the copy that was submitted first. An error of
        the job store becomes the attempt's `error`."""
        assert webhook.job_id is not None
        started_at, clock = time.time(), time.perf_counter()
        answer: dict[str, object] | None = None
        error = None
        try:
            source = self._store.get(webhook.job_id).spec
            answer = self._answer(source, due, webhook, cipher)
        except (JobError, HubError) as failure:
            error = str(failure)
        return Attempt(
            started_at=started_at,
            milliseconds=1000 * (time.perf_counter() - clock),
            response_status=None if answer is None else 202,
            response_head=None if answer is None else json.dumps(answer),
            error=error,
        )

    def _answer(
        self, source: JobSpec, due: Due, webhook: StoredWebhook, cipher: Cipher
    ) -> dict[str, object]:
        payload = json.loads(due.payload)
        if payload["event"]["scope"] == PING:
            return {"pong": True}
        # The store recognises a repeated delivery by its id. A forced replay has a new id, so it
        # starts another job.
        delivery = Delivery(source=f"webhook/{webhook.id}", id=due.id)
        copy = source.model_copy(
            update={
                "sealed_env": self._sealed_env(source, webhook, cipher),
                "revisions": _revisions(source, due),
                "labels": {**source.labels, "webhook": webhook.id, "copy-of": webhook.job_id or ""},
            }
        )
        return {"job": self._store.submit(copy, payload=payload, delivery=delivery).job.id}

    def _sealed_env(self, source: JobSpec, webhook: StoredWebhook, cipher: Cipher) -> str | None:
        """The encrypted secrets of the copy: those of the source and those of the webhook. If both
        have the same variable, the webhook's value counts."""
        variables = variables_of(webhook, cipher)
        if (secret := cipher.decrypt(webhook.encrypted_secret)) is not None:
            variables["WEBHOOK_SECRET"] = secret
        if not variables:
            return source.sealed_env
        if source.sealed_env is not None:
            variables = unseal(source.sealed_env, self._secret_key) | variables
        return seal(variables, self._secret_key)


def _revisions(source: JobSpec, due: Due) -> RevisionRange | None:
    """The commits that the copy is for. None if the source is not for commits of a ref, or if the
    delivery is not about new commits of this ref."""
    if source.revisions is None:
        return None
    payload = WebhookPayload.model_validate_json(due.payload)
    for update in payload.updatedRefs or ():
        if update.ref == source.revisions.ref and update.newSha is not None:
            return RevisionRange(
                repo=payload.repo.name,
                ref=update.ref,
                old_sha=update.oldSha,
                new_sha=update.newSha,
            )
    return None
