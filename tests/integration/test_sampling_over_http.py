"""What a request asks for is what the engine is told; what it gets wrong is named."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from serving.weights.release_store import set_current
from tests.contract.engine_bench import swap
from tests.scripted_engine import ScriptedEngine
from tests.serving_fixtures import CHAT_TEMPLATE, EOS, echo_app, echo_release, running


@dataclass(frozen=True)
class Server:
    url: str
    engine: ScriptedEngine

    def ask(self, route: str, **body: Any) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/{route}", json=body)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    pipeline_dir = tmp_path_factory.mktemp("home") / "answers"
    set_current(pipeline_dir, echo_release(pipeline_dir, 1, chat_template=CHAT_TEMPLATE).id)
    engine = ScriptedEngine()
    with running(echo_app(pipeline_dir, engine)) as url:
        yield Server(url, engine)


PROMPTS = {"completions": {"prompt": "Hi"}, "chat/completions": {"messages": [
    {"role": "user", "content": "Hi"}
]}}  # fmt: skip


@pytest.mark.parametrize("route", PROMPTS)
@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("temperature", 0.5, 0.5),
        ("top_p", 0.25, 0.25),
        ("top_k", 7, 7),
        ("top_k", -1, 0),
        ("top_k", 10**30, 0),
        ("min_p", 0.125, 0.125),
        ("presence_penalty", -1.5, -1.5),
        ("frequency_penalty", 1.5, 1.5),
        ("repetition_penalty", 1.25, 1.25),
        ("logit_bias", {"5": -100, "6": 2.5}, {5: -100.0, 6: 2.5}),
        ("min_tokens", 3, 3),
        ("seed", 11, 11),
        ("seed", -(2**63), -(2**63)),
        ("stop_token_ids", [9, 10], (9, 10, EOS)),
        ("ignore_eos", True, ()),
        ("max_tokens", 9, 9),
    ],
)
def test_each_field_reaches_the_engine(
    server: Server, route: str, field: str, value: Any, told: Any
) -> None:
    body = {"max_tokens": 5, **PROMPTS[route], field: value}
    assert server.ask(route, **body).status_code == 200
    (generation,) = server.engine.told[-1:]
    found = getattr(generation, "stop_token_ids" if field == "ignore_eos" else field)
    assert (set(found) if field == "stop_token_ids" else found) == (
        set(told) if field == "stop_token_ids" else told
    )


TOOL = {"type": "function", "function": {"name": "add"}}
NAMED = {"type": "function", "function": {"name": "sub"}}


@pytest.mark.parametrize(
    ("change", "param", "said"),
    [
        ({"messages": "Hi"}, "messages", 'valid list, got "Hi"'),
        ({"messages": [{"content": "Hi"}]}, "messages", "message 1 has no `role`"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages", "'image'"),
        ({"logprobs": 2}, "logprobs", "boolean, got 2"),
        ({"top_logprobs": 2}, "top_logprobs", "needs logprobs: true"),
        ({"n": 129}, "n", "more than 128 sequences"),
        ({"tools": [{"type": "function"}]}, "tools", "tools.0.function: Field required"),
        ({"tools": [TOOL]}, "tools", "shows none to the model"),
        ({"tool_choice": "required"}, "tool_choice", "no tools to choose from"),
        ({"tools": [TOOL], "tool_choice": NAMED}, "tool_choice", "'sub' is none of the tools"),
        ({"continue_final_message": True}, "continue_final_message", "not supported"),
    ],
)
def test_a_wrong_field_of_a_chat_is_named(
    server: Server, change: dict[str, Any], param: str, said: str
) -> None:
    answer = server.ask("chat/completions", **{**PROMPTS["chat/completions"], **change})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param and said in error["message"]


def test_metrics_and_models_tell_of_a_swap(tmp_path: Path) -> None:
    first, second = (echo_release(tmp_path, seed) for seed in (1, 2))
    set_current(tmp_path, first.id)
    with running(echo_app(tmp_path)) as url, httpx.Client(base_url=url) as http:
        asked = int(time.time())
        assert swap(http, second.id).json()["result"] == "live"
        assert swap(http, "r000009-00000000").json()["result"] == "refused"
        (model,) = http.get("/v1/models").json()["data"]
        assert (model["release"], asked <= model["created"] <= time.time()) == (second.id, True)
        lines = http.get("/metrics").text.splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    for phase in ("preflight", "stage", "commit", "probe", "barrier"):
        # Once at the start, for the release that `current` named, and once asked for.
        assert values[f'serving_swap_seconds_count{{phase="{phase}"}}'] == "2.0"
    assert values['serving_swaps_total{result="live"}'] == "2.0"
    assert values['serving_swaps_total{result="refused"}'] == "1.0"
    assert values[f'serving_release_live{{release="{second.id}"}}'] == "1.0"
