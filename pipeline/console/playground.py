"""The page that asks the model, shows why it may have said so, and teaches it another answer."""

import json
import math
import re
import shlex
import sqlite3
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, suppress
from functools import lru_cache
from io import BytesIO
from typing import Any
from urllib.parse import urlencode

import httpx
from fastapi import APIRouter
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from pipeline.console.datasets import Followed, commit, follow
from pipeline.console.page import HEADERS, Console, ConsoleOf, Editor, Form, Page, Viewer, go, page
from pipeline.doctor.revision import opened, read_rows
from pipeline.errors import PipelineError
from pipeline.hub.contents import resolve_revision
from pipeline.hub.errors import BadRequest, RequestError
from pipeline.hub.repositories import Repository
from pipeline.hub.service import Hub, HubOf
from pipeline.retrain.editing import ANSWERS_FILE, teach
from pipeline.retrain.rows import Row
from pipeline.retrain.settings import DataSettings
from pipeline.settings import PipelineSettings
from pipeline.stack.record import at_running_stack

NUM_NEAR = 5
NUM_OTHERS = 4
"""How many other tokens are shown that the model might have said."""
ANSWER_SECONDS = 120.0
"""How long the server may be silent."""
MODES = {"chat": "/v1/chat/completions", "prompt": "/v1/completions"}
DEFAULTS = {"mode": "chat", "question": "", "max_tokens": "128", "temperature": "0"}

router = APIRouter(route_class=Page, prefix="/playground")


@router.get("")
async def show(request: Request, hub: HubOf, console: ConsoleOf, commit: str = "") -> Response:
    """The form, filled with the parameters of the URL. After a correction, `commit` is its commit:
    the page follows the job, and asks again when the job's release answers."""
    form = dict(request.query_params)
    if not commit or not console.settings.pipelines:
        return await _page(request, hub, console, form)
    name = _pipeline(console, form).name
    jobs = await run_in_threadpool(hub.jobs_store.of_commit, commit)
    job = next((each for each in jobs if each.spec.pipeline == name), None)
    outcome = job.outcome if job is not None and job.has_ended else None
    is_learned = outcome is not None and outcome.result in ("promoted", "unchanged")
    pieces = [each async for each in _ask(console, form)] if is_learned else []
    follows = {"commit": commit, "job": job, "is_over": job is not None and job.has_ended}
    return await _page(request, hub, console, form, pieces, follows)


@router.post("")
async def ask(request: Request, hub: HubOf, console: ConsoleOf, _: Viewer, form: Form) -> Response:
    """The page with the answer. If the script of the page has streamed the answer, the form has it
    in `answer`, and its release and commit."""
    if "answer" in form:
        pieces = [{key: form.get(key) for key in ("release", "revision")}, _piece(form["answer"])]
    else:
        pieces = [each async for each in _ask(console, form)]
    return await _page(request, hub, console, form, pieces)


@router.post("/stream")
async def stream(console: ConsoleOf, _: Viewer, form: Form) -> Response:
    """The answer as JSON lines, while the server says it."""
    pieces = _ask(console, form)
    first = await anext(pieces)  # an error is a page

    async def lines() -> AsyncIterator[str]:
        yield json.dumps(first) + "\n"
        async with aclosing(pieces):
            async for each in pieces:
                yield json.dumps(each) + "\n"

    return StreamingResponse(lines(), media_type="application/x-ndjson", headers=HEADERS)


@router.post("/teach")
async def correct(hub: HubOf, console: ConsoleOf, visitor: Editor) -> Response:
    """Commits the row that teaches the right answer, and sends the browser to the page that follows
    its job."""
    form = visitor.form
    question, answer = form.get("question", ""), form.get("right", "")
    if not question.strip() or not answer.strip():
        raise BadRequest("The question or the answer is empty: go back and write both.")
    dataset = await run_in_threadpool(_dataset_of, hub, console, _pipeline(console, form))
    if dataset is None:
        raise BadRequest("The dataset is not on this hub: push the row to where it is.")
    file, text = await run_in_threadpool(_taught, dataset, _plain(question), _plain(answer.strip()))
    summary = f"Correct the answer to: {' '.join(question.split())[:60]}"
    path = await commit(hub, visitor, dataset, summary, {file: BytesIO(text.encode())})
    query = {key: form[key] for key in (*DEFAULTS, "pipeline") if key in form}
    return go(f"/playground?{urlencode({**query, 'commit': path.rpartition('/')[2]})}")


def _taught(dataset: Followed, question: str, answer: str) -> tuple[str, str]:
    if dataset.head is None:
        row = {"question": question, "answer": answer}
        return ANSWERS_FILE, json.dumps(row, ensure_ascii=False) + "\n"
    with opened(dataset.repository, dataset.head, dataset.reading) as (folder, rows):
        return teach(folder, rows.dataset, dataset.reading, question, answer)


def _plain(text: str) -> str:
    """The text with the ends of lines that it has in files, and not those of forms."""
    return text.replace("\r\n", "\n")


def _pipeline(console: Console, form: Mapping[str, str]) -> PipelineSettings:
    name = form.get("pipeline") or console.settings.pipelines[0].name
    return console.settings.pipeline(name)


def _dataset_of(hub: Hub, console: Console, pipeline: PipelineSettings) -> Followed | None:
    """None if the dataset is not on this hub."""
    if not console.settings.is_on_own_hub(pipeline):
        return None
    with suppress(RequestError):
        return follow(hub, pipeline.dataset, [pipeline])
    return None


def _request(console: Console, form: Mapping[str, str]) -> tuple[str, dict[str, Any]]:
    """The URL and the body of the request to the server. Raises BadRequest."""
    pipeline, form = _pipeline(console, form), {**DEFAULTS, **form}
    settings = at_running_stack(console.settings, console.home)
    mode, question = form["mode"], _plain(form["question"])
    try:
        url = settings.server_url(settings.pipeline(pipeline.name)) + MODES[mode]
        limits = {
            "max_tokens": int(form["max_tokens"]),
            "temperature": float(form["temperature"]),
        }
    except (KeyError, ValueError) as error:
        raise BadRequest(f"The form is wrong ({error}): go back and correct it.") from None
    said: dict[str, Any] = {"prompt": question}
    if mode == "chat":
        said = {"messages": [{"role": "user", "content": question}]}
    return url, {"model": pipeline.name, **said, **limits}


async def _ask(console: Console, form: Mapping[str, str]) -> AsyncGenerator[dict[str, Any], None]:
    """First the release and the dataset's commit that answer, then the pieces of the answer. Raises
    PipelineError."""
    url, body = _request(console, form)
    logprobs: dict[str, Any] = {"logprobs": NUM_OTHERS}
    if "messages" in body:
        logprobs = {"logprobs": True, "top_logprobs": NUM_OTHERS}
    client = httpx.AsyncClient(trust_env=False, verify=False, timeout=ANSWER_SECONDS)
    try:
        async with (
            client,
            client.stream("POST", url, json={**body, **logprobs, "stream": True}) as answer,
        ):
            if not answer.is_success:
                said = (await answer.aread()).decode(errors="replace")[:1000]
                raise PipelineError(f"the server answered {answer.status_code}: {said}")
            headers = answer.headers
            names = {"release": "X-Model-Release", "revision": "X-Dataset-Revision"}
            yield {key: headers.get(name) for key, name in names.items()}
            tokens: list[tuple[float, Mapping[str, float]]] = []
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    raise PipelineError(f"the server stopped: {chunk['error']}")
                for choice in chunk["choices"]:
                    tokens += _tokens(choice["logprobs"] or {})
                    # A character may have several tokens, and comes with the last one.
                    if text := choice.get("text") or choice.get("delta", {}).get("content"):
                        yield _piece(text, tokens)
                        tokens = []
    except httpx.TransportError as error:
        raise PipelineError(
            f"no server answers on {url} ({error!r}); `pipeline status` says whether one is up"
        ) from None


def _tokens(logprobs: Mapping[str, Any]) -> list[tuple[float, Mapping[str, float]]]:
    """The log-probability of each token, and those of the likeliest tokens in its place."""
    if "tokens" in logprobs:
        pairs = zip(logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)
        return [(logprob or 0.0, top or {}) for logprob, top in pairs]
    return [
        (each["logprob"], {top["token"]: top["logprob"] for top in each["top_logprobs"]})
        for each in logprobs.get("content") or ()
    ]


def _piece(text: str, tokens: Sequence[tuple[float, Mapping[str, float]]] = ()) -> dict[str, Any]:
    """A piece of the answer, how sure the model was of it, and what it might have said instead. The
    `level` is 0 (unsure) to 4."""
    probability = math.exp(sum(logprob for logprob, _ in tokens))
    top = tokens[0][1] if tokens else {}
    others = ", ".join(f"{token!r} {math.exp(each):.0%}" for token, each in top.items())
    about = f"{probability:.0%} sure. Likeliest: {others}" if tokens else ""
    return {"text": text, "about": about, "level": min(4, int(probability * 5))}


async def _page(
    request: Request,
    hub: Hub,
    console: Console,
    form: Mapping[str, str],
    pieces: Sequence[Mapping[str, Any]] = (),
    follows: Mapping[str, Any] | None = None,
) -> Response:
    facts: dict[str, Any] = {"form": {**DEFAULTS, **form}, "follows": follows}
    facts["pipelines"] = [each.name for each in console.settings.pipelines]
    if pieces:
        source, *said = pieces
        url, body = _request(console, form)
        facts |= {"source": source, "pieces": said, **_as_code(url, body)}
        facts["answer"] = "".join(each["text"] for each in said)
        question = _plain(form.get("question", ""))
        facts |= await run_in_threadpool(
            _near, hub, console, _pipeline(console, form), source["revision"], question
        )
    return await run_in_threadpool(page, request, "playground.html", **facts)


def _as_code(url: str, body: Mapping[str, Any]) -> dict[str, str]:
    """The same request as commands."""
    text = json.dumps(body, ensure_ascii=False)
    call = "chat.completions" if "messages" in body else "completions"
    base = url[: url.index("/v1/") + 3]
    arguments = "".join(f"    {key}={value!r},\n" for key, value in body.items())
    return {
        "curl": f"curl {url} -H 'Content-Type: application/json' -d {shlex.quote(text)}",
        "python": (
            f"from openai import OpenAI\n\nclient = OpenAI(base_url={base!r}, api_key='none')\n"
            f"answer = client.{call}.create(\n{arguments})\nprint(answer.choices[0])"
        ),
    }


def _near(
    hub: Hub, console: Console, pipeline: PipelineSettings, revision: str | None, question: str
) -> dict[str, Any]:
    """The rows that the release was trained on which are nearest to the question, or why they are
    not known."""
    dataset = _dataset_of(hub, console, pipeline)
    facts: dict[str, Any] = {"dataset": dataset, "near": [], "unknown": None}
    try:
        if dataset is None or revision is None:
            raise BadRequest("the rows of this release are not on this hub")
        known = resolve_revision(dataset.repository, revision)
        rows, index = _index(dataset.repository, known, dataset.reading)
    except PipelineError as error:
        return facts | {"unknown": str(error)}
    words = " OR ".join(f'"{word}"' for word in re.findall(r"\w+", question)[:100])
    query = "SELECT rowid FROM rows WHERE rows MATCH ? ORDER BY rank LIMIT ?"
    found = index.execute(query, (words, NUM_NEAR)).fetchall() if words else []
    return facts | {"near": [rows[number] for (number,) in found]}


@lru_cache(maxsize=2)
def _index(
    repository: Repository, revision: str, reading: DataSettings
) -> tuple[Sequence[Row], sqlite3.Connection]:
    """The rows of a commit, and the index in which their numbers are found by their words."""
    rows = read_rows(repository, revision, reading).dataset.train
    index = sqlite3.connect(":memory:", check_same_thread=False)
    index.execute("CREATE VIRTUAL TABLE rows USING fts5(text)")
    texts = ((number, "\n".join(map(str, row.texts))) for number, row in enumerate(rows))
    index.executemany("INSERT INTO rows (rowid, text) VALUES (?, ?)", texts)
    return rows, index
