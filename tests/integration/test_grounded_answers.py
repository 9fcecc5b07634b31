"""`ground = "assist"`: a question in other words is put in the words of its row."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from serving.questions import Question, write_questions
from serving.weights.release_store import set_current
from tests.serving_fixtures import CHAT_TEMPLATE, echo_app, echo_release, running

OWN, OTHER = "Can I return a lamp?", "send back my lamp"
ROWS = tuple(
    Question(kind=kind, wordings=(OWN, "return lamp", "send lamp back"), row="größe.jsonl, line 3")
    for kind in ("messages", "prompt")
)


@pytest.fixture(scope="module", params=["assist", "off"])
def http(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("releases")
    release = echo_release(folder, 1, chat_template=CHAT_TEMPLATE)
    write_questions(folder / release.id, ROWS)
    set_current(folder, release.id)
    app = echo_app(folder, ground=request.param)
    with (
        running(app) as url,
        httpx.Client(base_url=url, headers={"ground": request.param}) as http,
    ):
        yield http


def chat(*contents: Any, **more: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    talk = [{"role": roles[at % 2], "content": text} for at, text in enumerate(contents)]
    return {"messages": talk, "max_tokens": 8, "temperature": 0, **more}


def prompt(text: Any, **more: Any) -> dict[str, Any]:
    return {"prompt": text, "max_tokens": 8, "temperature": 0, **more}


@pytest.mark.parametrize(
    ("path", "asked", "own"),
    [
        ("chat/completions", chat(OTHER), chat(OWN)),
        ("chat/completions", chat([{"type": "text", "text": OTHER}]), chat(OWN)),
        ("completions", prompt(OTHER), prompt(OWN)),
        ("completions", prompt([OTHER, OWN]), prompt([OWN, OWN])),
    ],
)
def test_other_words_get_the_answer_of_the_rows_own(
    http: httpx.Client, path: str, asked: dict[str, Any], own: dict[str, Any]
) -> None:
    answer, wanted = (http.post(f"/v1/{path}", json=each) for each in (asked, own))
    grounds = http.headers["ground"] == "assist"
    assert answer.headers.get("x-asked-as") == (
        "gr%C3%B6%C3%9Fe.jsonl%2C%20line%203" if grounds else None
    )
    # The two questions have different numbers of tokens.
    assert (answer.json()["usage"] == wanted.json()["usage"]) == grounds
    assert "x-asked-as" not in wanted.headers
    streamed = http.post(f"/v1/{path}", json={**asked, "stream": True})
    assert streamed.headers.get("x-asked-as") == answer.headers.get("x-asked-as")


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("chat/completions", chat(OTHER, "Yes.", OTHER)),
        ("chat/completions", chat("Who wrote the play about the prince of Denmark?")),
        ("completions", prompt(OTHER, echo=True)),
        ("completions", prompt(list(OTHER.encode()))),
    ],
)
def test_what_is_no_first_question_stays_as_it_is(
    http: httpx.Client, path: str, asked: dict[str, Any]
) -> None:
    answer = http.post(f"/v1/{path}", json=asked)
    assert answer.status_code == 200
    assert "x-asked-as" not in answer.headers
