"""Whatever fits the server's OpenAPI document, or nearly, gets no 5xx."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import hypothesis
import pytest
import schemathesis
from fastapi import FastAPI
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.schemas import APIOperation

from serving.weights.release_store import set_current
from tests.serving_fixtures import ADMIN_TOKEN, CHAT_TEMPLATE, echo_app, echo_release, running

KEY = "api-secret"
STATUSES = {
    ("GET", "/live"): (200,),
    ("GET", "/health"): (200,),
    ("GET", "/metrics"): (200,),
    ("GET", "/v1/models"): (200, 401),
    ("GET", "/v1/models/{model}"): (200, 401, 404),
    ("POST", "/v1/completions"): (200, 400, 401, 404),
    ("POST", "/v1/chat/completions"): (200, 400, 401, 404),
    ("POST", "/admin/swap"): (200, 400, 401, 403, 422),
}
OPEN = {"/live", "/health", "/metrics"}


@dataclass(frozen=True)
class Server:
    url: str
    operations: dict[tuple[str, str], APIOperation]


def described(app: FastAPI) -> dict[str, Any]:
    """The server's own document, with requests that are quickly answered, and without keys: the
    test itself sends these."""
    document = copy.deepcopy(app.openapi())
    for methods in document["paths"].values():
        for operation in methods.values():
            operation.pop("security", None)
    for parts in document["components"]["schemas"].values():
        for part in parts.get("properties", {}).values():
            # Lists that are too long would take minutes to make.
            for each in (part, *part.get("anyOf", ())):
                each.pop("maxItems", None)
    for name in ("CompletionRequest", "ChatRequest"):
        properties = document["components"]["schemas"][name]["properties"]
        properties["model"] = {"enum": ["answers", None, "another"]}
        properties["n"] = {"type": "integer", "minimum": 1, "maximum": 3}
    return document


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("openapi")
    set_current(folder, echo_release(folder, 1, chat_template=CHAT_TEMPLATE).id)
    app = echo_app(folder, api_key=KEY)
    document = described(app)
    found = {
        (method.upper(), path) for path, methods in document["paths"].items() for method in methods
    }
    assert found == set(STATUSES)
    schema = schemathesis.openapi.from_dict(document)
    with running(app) as url:
        schema.config.update(base_url=url)
        operations = [result.ok() for result in schema.get_all_operations()]
        yield Server(url, {(each.method.upper(), each.path): each for each in operations})


@pytest.mark.parametrize("num_examples", [5, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("route", STATUSES, ids=" ".join)
def test_no_answer_is_a_5xx_or_unexpected(
    server: Server, route: tuple[str, str], num_examples: int
) -> None:
    operation = server.operations[route]
    token = ADMIN_TOKEN if operation.path.startswith("/admin") else KEY

    def check(case: Case) -> None:
        # No route matches a line feed, so that nobody is asked for a key.
        in_path = "".join(map(str, (case.path_parameters or {}).values()))
        if case.path not in OPEN and "%0A" not in in_path and "\n" not in in_path:
            assert case.call().status_code == 401, case.path
        headers = {"Authorization": f"Bearer {token}"}
        answer = case.call_and_validate(
            headers=headers,
            checks=[not_a_server_error],
        )
        assert answer.status_code in STATUSES[route], answer.text

    for mode in GenerationMode if operation.body else [GenerationMode.POSITIVE]:
        hypothesis.settings(
            max_examples=num_examples,
            deadline=None,
            suppress_health_check=list(hypothesis.HealthCheck),
            database=None,
        )(hypothesis.given(operation.as_strategy(generation_mode=mode))(check))()
