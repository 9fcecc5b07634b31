"""Whatever fits a description of the server's routes, or nearly: no 5xx, and documented answers.

The routes are OpenAI's, which the server does not describe itself; the description here is made of
the models of its requests, and a test sees to it that no route is missing.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import hypothesis
import pytest
import schemathesis
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.schemas import APIOperation
from schemathesis.specs.openapi.checks import (
    response_schema_conformance,
    status_code_conformance,
)

from serving.openai_schemas import ChatRequest, CompletionRequest
from serving.swap_schemas import SwapRequest
from serving.weights.release_store import set_current
from tests.serving_fixtures import ADMIN_TOKEN, CHAT_TEMPLATE, echo_app, echo_release, running

KEY = "api-secret"
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {"type": "object", "required": ["message", "type", "param", "code"]},
    },
}
REQUESTS = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/admin/swap": SwapRequest,
}
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
    operations: tuple[APIOperation, ...]


def described() -> dict[str, Any]:
    paths: dict[str, Any] = {}
    for (method, path), statuses in STATUSES.items():
        operation: dict[str, Any] = {
            "responses": {
                str(status): {"description": "", **body_of(path, status)} for status in statuses
            }
        }
        if path.endswith("{model}"):
            name = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
            operation["parameters"] = [name]
        if path in REQUESTS:
            schema = REQUESTS[path].model_json_schema(ref_template=f"#/components/{path}/{{model}}")
            definitions = schema.pop("$defs", {})
            schema = inlined(schema, definitions, f"#/components/{path}/")
            if "model" in schema["properties"]:
                schema["properties"]["model"] = {"enum": ["answers", None, "another"]}
                # More is allowed, and takes longer.
                schema["properties"]["n"] = {"type": "integer", "minimum": 1, "maximum": 3}
            operation["requestBody"] = {
                "required": True,
                "content": {"application/json": {"schema": schema}},
            }
        paths.setdefault(path, {})[method.lower()] = operation
    return {"openapi": "3.1.0", "info": {"title": "server", "version": "1"}, "paths": paths}


def body_of(path: str, status: int) -> dict[str, Any]:
    if status == 200 or (path, status) == ("/admin/swap", 422):  # the result of a swap
        return {}
    return {"content": {"application/json": {"schema": ERROR}}}


def inlined(part: Any, definitions: dict[str, Any], prefix: str) -> Any:
    if isinstance(part, list):
        return [inlined(each, definitions, prefix) for each in part]
    if not isinstance(part, dict):
        return part
    if "$ref" in part:
        return inlined(definitions[part["$ref"].removeprefix(prefix)], definitions, prefix)
    return {name: inlined(value, definitions, prefix) for name, value in part.items()}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("openapi")
    set_current(folder, echo_release(folder, 1, chat_template=CHAT_TEMPLATE).id)
    app = echo_app(folder, api_key=KEY)
    found = {
        (method, route.path.replace(":path", ""))
        for route in app.routes
        for method in (getattr(route, "methods", None) or set()) - {"HEAD"}
    }
    assert {each for each in found if not each[1].startswith(("/docs", "/redoc"))} == set(STATUSES)
    schema = schemathesis.openapi.from_dict(described())
    with running(app) as url:
        schema.config.update(base_url=url)
        yield Server(url, tuple(result.ok() for result in schema.get_all_operations()))


@pytest.mark.parametrize("num_examples", [5, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("place", range(len(STATUSES)), ids=[path for _, path in STATUSES])
def test_no_answer_is_a_5xx_or_undocumented(server: Server, place: int, num_examples: int) -> None:
    operation = server.operations[place]
    token = ADMIN_TOKEN if operation.path.startswith("/admin") else KEY

    def check(case: Case) -> None:
        # No route matches a line feed, so that nobody is asked for a key.
        in_path = "".join(map(str, (case.path_parameters or {}).values()))
        if case.path not in OPEN and "%0A" not in in_path and "\n" not in in_path:
            assert case.call().status_code == 401, case.path
        headers = {"Authorization": f"Bearer {token}"}
        case.call_and_validate(
            headers=headers,
            checks=[not_a_server_error, status_code_conformance, response_schema_conformance],
        )

    for mode in GenerationMode if operation.body else [GenerationMode.POSITIVE]:
        hypothesis.settings(
            max_examples=num_examples,
            deadline=None,
            suppress_health_check=list(hypothesis.HealthCheck),
            database=None,
        )(hypothesis.given(operation.as_strategy(generation_mode=mode))(check))()
