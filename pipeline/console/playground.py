"""The page that asks the model, shows why it may have said so, and teaches it another answer."""

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from io import BytesIO
from typing import Annotated, Any, Literal
from urllib.parse import urlencode

from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict, SecretStr
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from pipeline.console.datasets import commit, in_short, of_pipeline
from pipeline.console.page import HEADERS, Console, ConsoleOf, Editor, Form, Page, go, page
from pipeline.doctor.revision import nearest, opened
from pipeline.errors import PipelineError
from pipeline.hub.errors import BadRequest, Conflict, NotFound
from pipeline.hub.routes.commits import Files
from pipeline.hub.service import Hub, HubOf
from pipeline.retrain.editing import teach
from pipeline.stack.asking import ask
from pipeline.stack.record import at_running_stack

Pieces = Sequence[Mapping[str, Any]]
"""As `ask` gives them."""

router = APIRouter(route_class=Page, prefix="/playground")


class Question(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    pipeline: str | None = None
    mode: Literal["chat", "prompt"] = "chat"
    question: str = ""
    max_tokens: int = 64
    temperature: float = 0
    commit: str | None = None
    """The commit that teaches the right answer."""

    def request(self, console: Console) -> tuple[str, dict[str, Any], SecretStr | None]:
        """The URL of the server, the body that asks it, and its API key."""
        settings = at_running_stack(console.settings, console.home)
        pipeline = settings.pipeline(self.pipeline)
        path = "completions"
        said: dict[str, Any] = {"prompt": self.question}
        if self.mode == "chat":
            path = "chat/completions"
            said = {"messages": [{"role": "user", "content": self.question}]}
        limits = {"max_tokens": self.max_tokens, "temperature": self.temperature}
        url = f"{settings.server_url(pipeline)}/v1/{path}"
        return url, {"model": pipeline.name, **said, **limits}, settings.serving.api_key


@router.get("")
async def show(
    request: Request, hub: HubOf, console: ConsoleOf, asked: Annotated[Question, Query()]
) -> Response:
    """The form. After a correction, it follows the job of its commit, and asks the question again
    when the release of the job answers."""
    pieces, job = [], None
    if asked.commit is not None:
        name = console.settings.pipeline(asked.pipeline).name
        jobs = await run_in_threadpool(hub.jobs_store.of_commit, asked.commit)
        job = next((each for each in jobs if each.spec.pipeline == name), None)
        if job and job.outcome and job.outcome.result in ("promoted", "unchanged"):
            pieces = [each async for each in ask(*asked.request(console))]
    return await run_in_threadpool(_page, request, hub, console, asked, pieces, job=job)


@router.post("")
async def answer(request: Request, hub: HubOf, console: ConsoleOf, form: Form) -> Response:
    """The page with the answer. The script of the page sends the answer that it has shown already,
    and where it came from."""
    asked = Question.model_validate(form)
    if "answer" in form:
        pieces = [form, {"text": form["answer"]}]
    else:
        pieces = [each async for each in ask(*asked.request(console))]
    return await run_in_threadpool(_page, request, hub, console, asked, pieces)


@router.post("/stream")
async def stream(console: ConsoleOf, form: Form) -> Response:
    """The pieces of the answer as lines of JSON, while the server says them."""
    pieces = ask(*Question.model_validate(form).request(console))
    first = await anext(pieces)  # an error is a page

    async def lines() -> AsyncIterator[str]:
        yield json.dumps(first) + "\n"
        async with aclosing(pieces):
            async for each in pieces:
                yield json.dumps(each) + "\n"

    return StreamingResponse(lines(), media_type="application/x-ndjson", headers=HEADERS)


@router.post("/teach")
async def correct(hub: HubOf, console: ConsoleOf, editor: Editor) -> Response:
    """Commits the row that teaches the right answer. Leads to the page that follows its job."""
    asked, right = Question.model_validate(editor.form), editor.form.get("right", "").strip()
    pipeline = console.settings.pipeline(asked.pipeline)
    dataset = await run_in_threadpool(of_pipeline, hub, console, pipeline)
    if dataset is None or not right or not asked.question:
        raise BadRequest("This needs a question, an answer, and a dataset on this hub.")

    def taught() -> tuple[str, Files]:
        chosen = editor.form.get("row")
        question = chosen or asked.question
        with opened(dataset.repository, dataset.head, dataset.reading) as (folder, rows):
            train = rows.dataset.train
            is_known = any(question in (row.last_question, *row.paraphrases) for row in train)
            if chosen and not is_known:
                raise Conflict("The row has changed since it was shown: ask again.")
            files = teach(folder, rows.dataset, dataset.reading, question, right)
            for file in files:
                rows.check_editable(file)
        done = f"{'Correct' if is_known else 'Add'} the answer to"
        return in_short(done, question), {file: BytesIO(text) for file, text in files.items()}

    summary, files = await run_in_threadpool(taught)
    sha = await commit(hub, editor, dataset, dataset.head or "", summary, files)
    again = asked.model_copy(update={"commit": sha})
    return go(f"/playground?{urlencode(again.model_dump(exclude_none=True))}")


def _page(
    request: Request, hub: Hub, console: Console, asked: Question, pieces: Pieces, **facts: Any
) -> Response:
    if pieces:
        source, *facts["pieces"] = pieces
        url, body, _ = asked.request(console)
        dataset = of_pipeline(hub, console, console.settings.pipeline(asked.pipeline))
        facts |= {"source": source, "url": url, "body": body, "dataset": dataset}
        try:
            if dataset is None:
                raise NotFound("they are not on this hub")
            head, learned = dataset.head or "none", source.get("revision") or "unknown"
            facts["newest"] = hub.jobs_store.of_commit(head)
            # The row that gave the answer is near, too, however it asks its question.
            text = "\n".join([asked.question, "".join(each["text"] for each in facts["pieces"])])
            facts["choices"] = nearest(dataset.repository, head, dataset.reading, text)
            facts["near"] = nearest(dataset.repository, learned, dataset.reading, asked.question)
        except PipelineError as error:
            facts["unknown"] = str(error)
    return page(request, "playground.html", asked=asked, **facts)
