"""A body is read only if its client may send it, and a body of wrong items makes few errors."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fastapi import APIRouter, FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.testclient import TestClient
from pydantic import BaseModel, TypeAdapter, ValidationError

from serving.admission import json_routes
from serving.chat import ChatRequest
from serving.http.server import MAX_COMMAS
from serving.openai_schemas import MAX_ITEMS, CompletionRequest, json_grammar
from serving.request_errors import MAX_SHOWN, from_validation

BODIES: dict[str, TypeAdapter[Any]] = {
    "completions": TypeAdapter(CompletionRequest),
    "chat": TypeAdapter(ChatRequest),
}
JSON = {"Content-Type": "application/json"}
HI = [{"role": "user", "content": "Hi"}]


def nodes(schema: object) -> Iterator[dict[str, Any]]:
    """All parts of a schema of pydantic."""
    if isinstance(schema, dict):
        yield schema
        for part in schema.values():
            yield from nodes(part)
    elif isinstance(schema, list | tuple):
        for part in schema:
            yield from nodes(part)


@pytest.mark.parametrize("name", BODIES)
def test_every_list_of_a_body_is_bounded_and_stops_at_its_first_error(name: str) -> None:
    lists = []
    for node in nodes(BODIES[name].core_schema):
        is_list = node.get("type") == "list"
        values = node.get("values_schema")
        is_dict = node.get("type") == "dict" and values is not None and values["type"] != "any"
        if is_list or is_dict:
            lists.append(node)
    assert lists
    for node in lists:
        assert node.get("fail_fast") and "max_length" in node, node


WRONG: list[tuple[str, dict[str, Any]]] = [
    ("chat", {"messages": [0] * 3}),
    ("chat", {"messages": HI, "tools": [0] * 3}),
    ("completions", {"prompt": "a", "stop": [0] * 3}),
    ("completions", {"prompt": "a", "structured_outputs": {"choice": [0] * 3}}),
    ("completions", {"prompt": "a", "structured_outputs": {str(i): 0 for i in range(30)}}),
    ("completions", {"prompt": "a", "logit_bias": {str(i): "" for i in range(3)}}),
]


@pytest.mark.parametrize(("name", "body"), WRONG)
def test_the_number_of_errors_does_not_grow_with_the_wrong_items(
    name: str, body: dict[str, Any]
) -> None:
    with pytest.raises(ValidationError) as raised:
        BODIES[name].validate_python(body)
    few = raised.value.error_count()
    longer = json.loads(json.dumps(body), object_hook=lengthened)
    with pytest.raises(ValidationError) as raised:
        BODIES[name].validate_python(longer)
    assert raised.value.error_count() == few


def lengthened(value: dict[str, Any]) -> dict[str, Any]:
    """`value` with ten times as many wrong items."""
    for key, items in value.items():
        if items == [0] * 3:
            value[key] = items * 10
    if all(key.isdigit() for key in value):
        return {str(i): next(iter(value.values())) for i in range(10 * len(value))}
    return value


def test_too_many_items_are_an_error() -> None:
    with pytest.raises(ValidationError, match=str(MAX_ITEMS)):
        BODIES["chat"].validate_python({"messages": HI * (MAX_ITEMS + 1)})
    BODIES["chat"].validate_python({"messages": HI * MAX_ITEMS})


def test_an_error_reads_few_faults_and_shows_short_values_only() -> None:
    class Fault(dict[str, Any]):
        num_read = 0

        def __getitem__(self, key: str) -> Any:
            Fault.num_read += key == "loc"
            return super().__getitem__(key)

    fault = Fault(type="x", loc=("body", "a"), msg="wrong", input="y" * (MAX_SHOWN + 1))
    error = from_validation(RequestValidationError([fault] * 100_000))
    assert error.detail == "a: wrong"
    assert Fault.num_read <= 100


def test_a_body_is_read_after_the_check_only() -> None:
    class Asked(BaseModel):
        text: str

    checked: list[str] = []

    async def check(request: Request) -> None:
        if "x-refused" in request.headers:
            raise HTTPException(403)
        checked.append(request.url.path)

    router = APIRouter(route_class=json_routes(check))

    @router.post("/")
    async def answer(asked: Asked) -> int:
        return len(asked.text)

    app = FastAPI()
    app.include_router(router)
    with TestClient(app) as client:
        assert client.post("/", content=b"{", headers={**JSON, "X-Refused": "1"}).status_code == 403
        assert checked == []
        assert client.post("/", json={"text": "abc"}).json() == 3
        wrong: httpx.Response = client.post("/", json={"text": 1})
        assert wrong.status_code == 422
        assert wrong.json()["detail"][0]["loc"] == ["body", "text"]
        assert client.post("/", content=b"{", headers=JSON).status_code == 400
        many = b'{"text": "a", "other": [' + b"1," * MAX_COMMAS + b"1]}"
        assert "commas" in client.post("/", content=many, headers=JSON).json()["detail"]
        assert client.post("/", content=b"", headers=JSON).status_code == 422


def test_unique_items_are_left_out_as_a_keyword() -> None:
    own = {"type": "boolean"}
    schema = {
        "type": "object",
        "properties": {"uniqueItems": own, "list": {"type": "array", "uniqueItems": True}},
        "enum": ["uniqueItems"],
    }
    expected = {**schema, "properties": {"uniqueItems": own, "list": {"type": "array"}}}
    assert json.loads(json_grammar(schema, "a").text) == expected


@pytest.mark.parametrize("schema", [True, False])
def test_a_schema_may_be_true_or_false(schema: bool) -> None:
    for form in (
        {"structured_outputs": {"json": schema}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}},
    ):
        grammar = CompletionRequest.model_validate({"prompt": "a", **form}).grammar
        assert grammar is not None and grammar.text == json.dumps(schema)
