"""A body is read only if its client may send it, and a body of wrong items makes few errors."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fastapi import APIRouter, FastAPI, HTTPException, Request
from fastapi.testclient import TestClient
from pydantic import BaseModel, TypeAdapter

from serving.admission import json_routes
from serving.chat import ChatRequest
from serving.http.server import MAX_COMMAS
from serving.openai_schemas import CompletionRequest, json_grammar

BODIES: dict[str, TypeAdapter[Any]] = {
    "completions": TypeAdapter(CompletionRequest),
    "chat": TypeAdapter(ChatRequest),
}
JSON = {"Content-Type": "application/json"}


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
