"""Any request to any route of the hub: never a crash, and nothing without the token."""

import json
import os
import re
import sqlite3
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from fastapi import FastAPI
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from jobs.spec import JobSpec
from jobs.store import JobStore
from pipeline.hub.app import create_app
from pipeline.hub.settings import HubSettings
from tests.hub_fixtures import SECRET_KEY, TOKEN, RunningHub, running_hub

NUM_REQUESTS = int(os.environ.get("HUB_REQUESTS", "150"))

OPEN = {"/health", "/live", "/api/validate-yaml"}
WRONG = ("Bearer", "Bearer wrong", "Basic", "Basic !", "Basic eDp5", "x y")


def routes() -> dict[str, list[str]]:
    """The template of each route's path → its methods."""
    with (
        tempfile.TemporaryDirectory() as folder,
        JobStore.open(Path(folder) / "jobs.sqlite") as store,
    ):
        app: Any = create_app(
            HubSettings(),
            Path(folder),
            token=TOKEN,
            secret_key=SECRET_KEY,
            jobs_store=store,
            jobs_dir=Path(folder) / "jobs",
            needed_commits=set,
        )
    cells = [cell.cell_contents for cell in app.__closure__]
    [api] = [one for one in cells if isinstance(one, FastAPI)]
    with warnings.catch_warnings(action="ignore"):  # some routes have several methods
        paths = api.openapi()["paths"]
    return {
        re.sub(r"{\w+}", "{}", path.replace("{repository}", "datasets/{}/{}")): [
            *map(str.upper, of)
        ]
        for path, of in paths.items()
    }


ROUTES = routes()
TEMPLATES = [*ROUTES]
VERBS = [
    "tree",
    "commits",
    "revision",
    "refs",
    "paths-info",
    "branch",
    "tag",
    "commit",
    "preupload",
    "settings",
]
assert all(any(f"/{verb}" in path for path in TEMPLATES) for verb in VERBS)

WATCHED = [{"type": "org", "name": "nobody"}]

names = st.text(max_size=20).filter(lambda name: name not in (".", ".."))
parts = st.one_of(st.sampled_from(["local", "facts", "main", "WEBHOOK", *VERBS]), names)
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
documents = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)
FIELDS = (
    "url jobSourceId watched domains secret secrets name type organization fromRepo toRepo paths "
    "title description comment status tag message key value files objects operation target"
)
bodies = st.one_of(
    st.binary(max_size=64),
    documents,
    st.dictionaries(st.sampled_from(FIELDS.split()), documents),
    st.fixed_dictionaries(
        {
            "url": st.sampled_from(
                ["http://127.0.0.1:9/", "http://169.254.169.254/", "x", "http://["]
            ),
            "watched": st.lists(
                st.fixed_dictionaries(
                    {"type": st.sampled_from(["dataset", "org"]), "name": st.text(max_size=9)}
                ),
                max_size=2,
            ),
        }
    ),
    st.fixed_dictionaries(
        {
            "jobSourceId": st.sampled_from(["j000001", "j999999"])
            | st.from_regex(r"j[0-9]{1,30}", fullmatch=True),
            "watched": st.just(WATCHED),
            "secrets": st.dictionaries(st.sampled_from(["A", "a b"]), st.text(max_size=9)),
        }
    ),
)
queries = st.dictionaries(
    st.sampled_from(["limit", "status", "force", "cursor", "expand", "recursive", "service"]),
    st.one_of(st.sampled_from(["1", "-1", "pending", "git-upload-pack"]), st.text(max_size=9)),
    max_size=3,
)


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningHub]:
    folder = tmp_path_factory.mktemp("routes")
    with (
        JobStore.open(folder / "jobs.sqlite") as store,
        running_hub(folder / "hub", jobs_store=store, reconcile_seconds=3600) as hub,
    ):
        store.submit(JobSpec(command=("true",)))
        hub.create_dataset("local/facts")
        yield hub


@pytest.fixture(scope="module")
def webhook(hub: RunningHub) -> str:
    return hub.api.create_webhook(url="http://127.0.0.1:9/", watched=WATCHED).id


@pytest.fixture(scope="module")
def client(hub: RunningHub) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=hub.url, verify=False, timeout=30) as client:
        yield client


def path_of(template: str, parts: list[str], webhook: str) -> str:
    chosen = (webhook if part == "WEBHOOK" else quote(part, safe="") for part in parts)
    return template.format(*chosen)


def send(client: httpx.Client, method: str, path: str, body: Any, **options: Any) -> httpx.Response:
    # With NaN and Infinity as Python writes them, which httpx refuses to send.
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return client.request(method, path, content=content, **options)


def of_job(number: str) -> dict[str, Any]:
    return {"jobSourceId": f"j{number}", "watched": WATCHED}


methods = st.sampled_from(["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
five_parts = st.lists(parts, min_size=5, max_size=5)


@settings(
    max_examples=NUM_REQUESTS, deadline=None, suppress_health_check=list(HealthCheck), database=None
)
@given(
    method=methods,
    template=st.sampled_from(TEMPLATES),
    parts=five_parts,
    body=bodies,
    query=queries,
)
@example("POST", "/api/settings/webhooks", ["x"] * 5, {"url": "http://[", "watched": []}, {})
@example("POST", "/api/settings/webhooks", ["x"] * 5, {"\x1b": None}, {})
@example("POST", "/api/settings/webhooks", ["x"] * 5, of_job("9" * 20), {})
@example("POST", "/api/settings/webhooks", ["x"] * 5, of_job("9" * 5000), {})
@example("POST", "/api/{}", [""] * 5, float("inf"), {})
@example("GET", "/api/settings/webhooks/{}", ["\x00"] * 5, b"", {})
@example("GET", "/api/datasets/{}/{}/{}/{}", ["local", "facts", "tree", "\x00", ""], b"", {})
def test_no_request_makes_the_hub_fail(
    hub: RunningHub,
    client: httpx.Client,
    webhook: str,
    method: str,
    template: str,
    parts: list[str],
    body: Any,
    query: dict[str, str],
) -> None:
    path = path_of(template, parts, webhook)
    headers = {"Authorization": f"Bearer {hub.token}"}
    answer = send(client, method, path, body, params=query, headers=headers)
    # 501 is the answer for what the Hugging Face Hub has and this hub has not.
    assert answer.status_code < 500 or answer.status_code == 501, (method, path, answer.text)


def test_each_route_asks_for_the_token(hub: RunningHub, client: httpx.Client, webhook: str) -> None:
    assert len(ROUTES) > 40
    before = stored(hub)
    for template, its_methods in ROUTES.items():
        names = [webhook] * 5 if "webhooks" in template else ["local", "facts", "main", "x", "x"]
        path = path_of(template, names, webhook)
        is_signed = path.startswith("/api/lfs/")
        for method in () if path in OPEN else its_methods:
            for proof in (None, *WRONG):
                headers = {} if proof is None else {"Authorization": proof}
                answer = client.request(method, path, headers=headers)
                # git-lfs asks for the token again and again as long as it is answered 401. No token
                # replaces the signature of a URL below `/api/lfs/`.
                is_lfs = "/info/lfs/" in path and bool(headers)
                expected = 403 if is_signed or is_lfs else 401
                assert answer.status_code == expected, (method, path, headers)
                # Without this header, git and git-lfs would not send the token.
                assert is_signed or is_lfs or "www-authenticate" in answer.headers, (method, path)
    assert stored(hub) == before


def stored(hub: RunningHub) -> list[Any]:
    """What a client can change. The hub itself changes when it tries a delivery again."""
    connection = sqlite3.connect(hub.root / "hub.sqlite")
    try:
        tables = [f"* FROM {table}" for table in ("repositories", "refs", "events")]
        tables.append("id, url, watched, domains, encrypted_secret, disabled FROM webhooks")
        return [connection.execute(f"SELECT {table}").fetchall() for table in tables]
    finally:
        connection.close()
