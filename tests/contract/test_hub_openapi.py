"""Whatever fits a description of the hub's routes, or nearly: no 5xx, nothing without the token.

The hub's routes are the Hub's, which has no description of its own; the one here holds each route
of the application, and a test sees to it that none is missing.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import schemathesis
from schemathesis import Case, GenerationMode

from jobs.spec import JobSpec
from jobs.store import JobStore
from pipeline.hub.app import create_app
from pipeline.hub.routes import transfers
from pipeline.hub.routes.dispatch import VERBS
from pipeline.hub.settings import HubSettings
from tests.hub_fixtures import SECRET_KEY, TOKEN, RunningHub, running_hub

STRING = {"type": "string"}
SERVICES = ("git-upload-pack", "git-receive-pack")
WATCHED = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "type": {"enum": ["model", "dataset", "space", "org", "user"]},
            "name": STRING,
        },
    },
}
WEBHOOK = {
    "url": {"enum": ["http://127.0.0.1:9/", "https://receiver.invalid/x"]},
    "watched": WATCHED,
    "domains": {"type": "array", "items": {"enum": ["repo", "discussion"]}},
    "secret": STRING,
    "jobSourceId": {"enum": ["j000001", "j999999", "j99999999999999999999", "j" + "9" * 5000]},
    "secrets": {"type": "object", "additionalProperties": STRING},
}
REPOSITORY = {"name": STRING, "type": {"enum": ["dataset", "model", "space"]}, "private": {}}
MOVE = {"fromRepo": STRING, "toRepo": STRING, "type": STRING}
LARGE_OBJECT = {
    "type": "object",
    "required": ["oid", "size"],
    "properties": {"oid": {"enum": ["0" * 64, "A" * 64, ""]}, "size": {"type": "integer"}},
}

SPACE_SETTING = {"key": STRING, "value": STRING, "description": STRING}

BODIES: dict[tuple[str, str], dict[str, Any]] = {
    ("POST", "/api/settings/webhooks"): WEBHOOK,
    ("POST", "/api/settings/webhooks/{id}"): WEBHOOK,
    ("POST", "/api/repos/create"): REPOSITORY,
    ("DELETE", "/api/repos/delete"): REPOSITORY,
    ("POST", "/api/repos/move"): MOVE,
    ("PUT", "/api/datasets/{owner}/{name}/settings"): {"private": {}, "visibility": STRING},
    ("POST", "/api/datasets/{owner}/{name}/paths-info/{revision}"): {"paths": {}},
    ("POST", "/api/datasets/{owner}/{name}/branch/{revision}"): {"startingPoint": STRING},
    ("POST", "/api/datasets/{owner}/{name}/tag/{revision}"): {"tag": STRING},
    ("POST", "/api/datasets/{owner}/{name}/super-squash/{revision}"): {"message": STRING},
    ("POST", "/api/validate-yaml"): {"content": STRING},
    ("POST", "/api/datasets/{owner}/{name}/commit/{revision}"): {"summary": STRING},
    ("POST", "/api/datasets/{owner}/{name}/preupload/{revision}"): {"files": {}},
    ("POST", "/api/datasets/local/facts/discussions"): {
        "title": STRING,
        "description": STRING,
        "pullRequest": {"type": "boolean"},
    },
    **{
        ("POST", f"/api/datasets/local/facts/discussions/{{num}}/{verb}"): {
            "comment": STRING,
            "title": STRING,
            "status": {"enum": ["open", "closed", "merged"]},
        }
        for verb in ("comment", "title", "status", "merge")
    },
    ("POST", "/api/datasets/local/facts/discussions/{num}/comment/{id}/edit"): {"content": STRING},
    ("POST", "/api/datasets/local/facts/lfs-files/duplicate"): {
        "target": {"type": "object", "properties": {"type": STRING, "name": STRING}},
        "files": {"type": "array", "items": {"type": "object", "properties": {"sha256": STRING}}},
    },
    **{
        (method, f"/api/spaces/local/app/{kind}"): SPACE_SETTING
        for method in ("POST", "DELETE")
        for kind in ("secrets", "variables")
    },
    ("POST", "/datasets/local/facts.git/info/lfs/objects/batch"): {
        "operation": {"enum": ["upload", "download"]},
        "objects": {"type": "array", "items": LARGE_OBJECT},
    },
}
# What the two routes of everything below a repository take apart by themselves.
BY_HAND = [
    *(("GET", f"/api/datasets/{{owner}}/{{name}}{rest}") for rest in ("", "/refs", "/auth-check")),
    *(
        ("GET", f"/api/datasets/{{owner}}/{{name}}/{verb}/{{revision}}")
        for verb in ("revision", "tree", "commits", "xet-write-token", "xet-read-token")
    ),
    ("GET", "/api/datasets"),
    ("GET", "/api/datasets/local/facts/discussions"),
    ("GET", "/api/datasets/local/facts/discussions/{num}"),
    ("GET", "/api/spaces/local/app/secrets"),
    ("GET", "/api/spaces/local/app/variables"),
    ("DELETE", "/api/datasets/{owner}/{name}/branch/{revision}"),
    ("DELETE", "/api/datasets/{owner}/{name}/tag/{revision}"),
    *(
        ("GET", f"/datasets/{{owner}}/{{name}}/{verb}/{{revision}}/{{path}}")
        for verb in ("resolve", "raw")
    ),
    *(
        ("POST", f"/datasets/{{owner}}/{{name}}.git/info/lfs/{rest}")
        for rest in ("objects/batch", "locks", "locks/verify")
    ),
    *(
        (method, f"/datasets/{repository}.git/{rest}")
        for repository in ("local/facts", "{owner}/{name}")
        for method, rest in (("GET", "info/refs"), *(("POST", service) for service in SERVICES))
    ),
    *BODIES,
]
OPEN = {"/health", "/live", "/api/agent-harnesses", "/api/validate-yaml"}


def routes(folder: Path) -> set[tuple[str, str]]:
    """Of the application itself: method and path."""
    app: Any = create_app(HubSettings(), folder, token=TOKEN, secret_key=SECRET_KEY)
    parts = [cell.cell_contents for cell in app.__closure__]
    return {
        (method, re.sub(r":\w+}", "}", route.path))
        for part in parts
        for route in getattr(part, "routes", ())
        for method in (route.methods or {"GET"}) - {"HEAD"}
    }


def described(found: set[tuple[str, str]]) -> dict[str, Any]:
    paths: dict[str, Any] = {}
    for method, path in sorted({*found, *BY_HAND}):
        operation: dict[str, Any] = {"responses": {"default": {"description": "any"}}}
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": STRING}
            for name in re.findall(r"{(\w+)}", path)
        ]
        if path.endswith("/info/refs"):
            service = {"name": "service", "in": "query", "schema": {"enum": list(SERVICES)}}
            operation["parameters"].append(service)
        if (method, path) in BODIES:
            schema = {"type": "object", "properties": BODIES[method, path]}
            operation["requestBody"] = {"content": {"application/json": {"schema": schema}}}
        paths.setdefault(path, {})[method.lower()] = operation
    return {"openapi": "3.1.0", "info": {"title": "hub", "version": "1"}, "paths": paths}


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningHub]:
    folder = tmp_path_factory.mktemp("openapi")
    with (
        JobStore.open(folder / "jobs.sqlite") as store,
        running_hub(folder / "hub", jobs_store=store, reconcile_seconds=3600) as hub,
    ):
        store.submit(JobSpec(command=("true",)))
        hub.create_dataset("local/facts")
        hub.api.create_repo("local/app", repo_type="space", space_sdk="gradio")
        yield hub


def test_no_route_is_missing_from_the_description(tmp_path: Path) -> None:
    found = routes(tmp_path)
    assert len(found) > 40
    signed = ("PUT", "/api/lfs/{repository_id}/objects/{oid}")
    assert {("GET", "/health"), ("GET", "/settings/webhooks"), signed} <= found
    below_repository = re.compile(r"/api/(?:datasets|spaces)/[^/]+/[^/]+/([^/]+)")
    verbs = {match[1] for _, path in BY_HAND if (match := below_repository.match(path))}
    assert verbs == VERBS


@pytest.mark.parametrize("num_examples", [5, pytest.param(50, marks=pytest.mark.slow)])
def test_each_route_stands_answers_and_asks_for_the_token(
    hub: RunningHub, tmp_path: Path, num_examples: int
) -> None:
    schema = schemathesis.openapi.from_dict(described(routes(tmp_path / "other")))
    schema.config.update(base_url=hub.url)
    for operation in (result.ok() for result in schema.get_all_operations()):

        def check(case: Case) -> None:
            if case.path not in OPEN:
                # What the hub signs needs no token, and the token replaces no signature.
                refused = 403 if case.path.startswith(transfers.PREFIX) else 401
                assert case.call().status_code == refused, case.path
            headers = {"Authorization": f"Bearer {hub.token}"}
            if (service := case.path.rpartition("/")[2]) in SERVICES:
                headers["Content-Type"] = f"application/x-{service}-request"
            answer = case.call(headers=headers)
            # 501 is the answer for what the Hugging Face Hub has and this hub has not.
            assert answer.status_code < 500 or answer.status_code == 501, answer.text

        # Any text may stand in a path: only a body can be wrong.
        for mode in GenerationMode if operation.body else [GenerationMode.POSITIVE]:
            hypothesis.settings(
                max_examples=num_examples,
                deadline=None,
                suppress_health_check=list(hypothesis.HealthCheck),
                database=None,
            )(hypothesis.given(operation.as_strategy(generation_mode=mode))(check))()
