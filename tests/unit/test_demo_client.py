"""The client that the demo sends its questions with."""

import pytest
from fastapi import FastAPI
from fastapi.responses import StreamingResponse

from pipeline.cli.demo import ask
from pipeline.errors import PipelineError
from tests.serving_fixtures import running


def test_an_answer_that_the_server_breaks_off_is_a_failure() -> None:
    app = FastAPI()

    @app.post("/v1/completions")
    def complete() -> StreamingResponse:
        events = ('data: {"error": {"message": "the release is gone"}}\n\n',)
        return StreamingResponse(iter(events), media_type="text/event-stream")

    with running(app) as url, pytest.raises(PipelineError, match="the release is gone"):
        ask(url, "facts", "What is asked?")
