"""Payloads in the form that their senders document, and the clients' side of each proof."""

import base64
import hashlib
import hmac
import json
import time
from typing import Any

OLD, NEW = "a" * 40, "b" * 40
ZEROS = "0" * 40

# The Hub's own samples: https://huggingface.co/docs/hub/webhooks#webhook-payloads
PULL_REQUEST_OPENED: dict[str, Any] = {
    "event": {"action": "create", "scope": "discussion"},
    "repo": {
        "type": "model",
        "name": "openai-community/gpt2",
        "id": "621ffdc036468d709f17434d",
        "private": False,
        "url": {
            "web": "https://huggingface.co/openai-community/gpt2",
            "api": "https://huggingface.co/api/models/openai-community/gpt2",
        },
        "owner": {"id": "628b753283ef59b5be89e937"},
    },
    "discussion": {
        "id": "6399f58518721fdd27fc9ca9",
        "title": "Update co2 emissions",
        "url": {
            "web": "https://huggingface.co/openai-community/gpt2/discussions/19",
            "api": "https://huggingface.co/api/models/openai-community/gpt2/discussions/19",
        },
        "status": "open",
        "author": {"id": "61d2f90c3c2083e1c08af22d"},
        "num": 19,
        "isPullRequest": True,
        "changes": {"base": "refs/heads/main"},
    },
    "comment": {
        "id": "6399f58518721fdd27fc9caa",
        "author": {"id": "61d2f90c3c2083e1c08af22d"},
        "content": "Add co2 emissions information to the model card",
        "hidden": False,
        "url": {"web": "https://huggingface.co/openai-community/gpt2/discussions/19#6399f585"},
    },
    "webhook": {"id": "6390e855e30d9209411de93b", "version": 3},
}


def dataset_update(
    *refs: dict[str, str | None],
    name: str = "acme/answers",
    type: str = "dataset",
    action: str = "update",
    scope: str = "repo.content",
    **repo: Any,
) -> dict[str, Any]:
    """A push; one to `main` unless `refs` say otherwise."""
    return {
        "event": {"action": action, "scope": scope},
        "repo": {
            "type": type,
            "name": name,
            "id": "6366c000a2abcdf2fd69a080",
            "private": False,
            "url": {
                "web": f"https://huggingface.co/datasets/{name}",
                "api": f"https://huggingface.co/api/datasets/{name}",
            },
            "owner": {"id": "61d2000c3c2083e1c08af22d"},
            "headSha": NEW,
            **repo,
        },
        "updatedRefs": list(refs) or [ref_update()],
        "webhook": {"id": "6390e855e30d9209411de93b", "version": 3},
    }


def ref_update(
    ref: str = "refs/heads/main", old: str | None = OLD, new: str | None = NEW
) -> dict[str, str | None]:
    return {"ref": ref, "oldSha": old, "newSha": new}


def without_refs(**changes: Any) -> dict[str, Any]:
    """What senders of before `updatedRefs` sent."""
    payload = dataset_update(**changes)
    del payload["updatedRefs"]
    return payload


BUCKET_UPDATED: dict[str, Any] = {
    **without_refs(type="bucket", name="acme/blobs"),
    "updatedFiles": [{"path": "rows.jsonl", "action": "update"}],
}

# https://docs.github.com/webhooks/webhook-events-and-payloads#push
GITHUB_PUSH: dict[str, Any] = {
    "ref": "refs/heads/main",
    "before": OLD,
    "after": NEW,
    "created": False,
    "deleted": False,
    "forced": False,
    "compare": "https://github.com/Codertocat/Hello-World/compare/aaaa...bbbb",
    "commits": [],
    "head_commit": None,
    "pusher": {"name": "Codertocat", "email": "21031067+Codertocat@users.noreply.github.com"},
    "repository": {
        "id": 186853002,
        "name": "Hello-World",
        "full_name": "Codertocat/Hello-World",
        "private": False,
        "owner": {"name": "Codertocat", "login": "Codertocat", "id": 21031067},
        "html_url": "https://github.com/Codertocat/Hello-World",
        "clone_url": "https://github.com/Codertocat/Hello-World.git",
        "default_branch": "main",
    },
}

# https://docs.gitea.com/usage/webhooks#event-information
GITEA_PUSH: dict[str, Any] = {
    "ref": "refs/heads/develop",
    "before": OLD,
    "after": NEW,
    "compare_url": "http://localhost:3000/gitea/webhooks/compare/aaaa...bbbb",
    "commits": [],
    "repository": {
        "id": 140,
        "owner": {"id": 1, "login": "gitea", "full_name": "Gitea", "username": "gitea"},
        "name": "webhooks",
        "full_name": "gitea/webhooks",
        "private": True,
        "html_url": "http://localhost:3000/gitea/webhooks",
        "clone_url": "http://localhost:3000/gitea/webhooks.git",
        "default_branch": "master",
    },
    "pusher": {"id": 1, "login": "gitea"},
    "sender": {"id": 1, "login": "gitea"},
}

# https://docs.gitlab.com/user/project/integrations/webhook_events/#push-events
GITLAB_PUSH: dict[str, Any] = {
    "object_kind": "push",
    "event_name": "push",
    "before": OLD,
    "after": NEW,
    "ref": "refs/heads/master",
    "ref_protected": True,
    "checkout_sha": NEW,
    "user_username": "jsmith",
    "project_id": 15,
    "project": {
        "id": 15,
        "name": "Diaspora",
        "web_url": "http://example.com/mike/diaspora",
        "git_ssh_url": "git@example.com:mike/diaspora.git",
        "git_http_url": "http://example.com/mike/diaspora.git",
        "namespace": "Mike",
        "visibility_level": 0,
        "path_with_namespace": "mike/diaspora",
        "default_branch": "master",
    },
    "commits": [],
    "total_commits_count": 4,
}


def body_of(payload: dict[str, Any]) -> bytes:
    return json.dumps(payload).encode()


def hmac_hex(secret: str, body: bytes) -> str:
    return hmac.new(secret.encode(), body, hashlib.sha256).hexdigest()


SIGNING_SECRET = "whsec_" + base64.b64encode(b"0123456789abcdef01234567").decode()
OTHER_SIGNING_SECRET = "whsec_" + base64.b64encode(b"fedcba987654321076543210").decode()


def standard_headers(
    body: bytes, *, secret: str = SIGNING_SECRET, id: str = "msg_1", at: float | None = None
) -> dict[str, str]:
    """https://www.standardwebhooks.com, written out from the text, not from the library."""
    timestamp = str(int(time.time() if at is None else at))
    key = base64.b64decode(secret.removeprefix("whsec_"))
    signed = hmac.new(key, f"{id}.{timestamp}.".encode() + body, hashlib.sha256).digest()
    return {
        "webhook-id": id,
        "webhook-timestamp": timestamp,
        "webhook-signature": "v1," + base64.b64encode(signed).decode(),
    }
