"""Delivers to a webhook that starts a job instead of calling a URL: submits a copy of the webhook's
job, with the payload in the environment of the copy."""

import json
import time
from dataclasses import dataclass

from jobs.job import Delivery
from jobs.sealed import seal, unseal
from jobs.spec import JobSpec, RevisionRange
from jobs.store import JobStore
from pipeline.hub.cipher import Cipher
from pipeline.hub.webhooks.outbox import Attempt, Due
from pipeline.hub.webhooks.store import StoredWebhook, variables_of
from receiver.payload import PING, WebhookPayload


@dataclass(frozen=True, kw_only=True)
class JobLauncher:
    store: JobStore
    cipher: Cipher
    secret_key: bytes
    """The runner that starts the copies has the same Fernet key, so it can decrypt their
    secrets."""

    def describe(self, job_id: str) -> dict[str, object]:
        """Describes the job to copy, in the form that `huggingface_hub` parses. Raises
        JobNotFound."""
        spec = self.store.get(job_id).spec
        return {
            "sourceId": job_id,
            "command": list(spec.command),
            "environment": spec.env,
            "labels": spec.labels,
            "timeout": spec.resources.timeout_seconds,
        }

    def launch(self, due: Due, webhook: StoredWebhook) -> Attempt:
        """Submits the copy. The result looks like an answer of a receiver: 202 with the copy's id.
        For a repeated delivery, this is the id of the copy that was submitted first. Raises
        JobError and HubError."""
        assert webhook.job_id is not None
        started_at, clock = time.time(), time.perf_counter()
        source = self.store.get(webhook.job_id).spec
        payload = WebhookPayload.model_validate_json(due.payload)
        answer: dict[str, object] = {"pong": True}
        if payload.event.scope != PING:
            copy = source.model_copy(
                update={
                    "sealed_env": self._sealed_env(source, webhook),
                    "revisions": _revisions(source, payload),
                    "labels": {**source.labels, "webhook": webhook.id, "copy-of": webhook.job_id},
                }
            )
            # The store recognises a repeated delivery by its id. A forced replay has a new id, so
            # it starts another job.
            delivery = Delivery(source=f"webhook/{webhook.id}", id=due.id)
            submitted = self.store.submit(copy, payload=json.loads(due.payload), delivery=delivery)
            answer = {"job": submitted.job.id}
        return Attempt(
            started_at=started_at,
            milliseconds=1000 * (time.perf_counter() - clock),
            response_status=202,
            response_head=json.dumps(answer),
        )

    def _sealed_env(self, source: JobSpec, webhook: StoredWebhook) -> str | None:
        """The encrypted secrets of the copy: those of the source and those of the webhook. If both
        have the same variable, the webhook's value counts."""
        variables = variables_of(webhook, self.cipher)
        if (secret := self.cipher.decrypt(webhook.encrypted_secret)) is not None:
            variables["WEBHOOK_SECRET"] = secret
        if not variables:
            return source.sealed_env
        if source.sealed_env is not None:
            variables = unseal(source.sealed_env, self.secret_key) | variables
        return seal(variables, self.secret_key)


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
