"""API route that checks a README before a client commits it."""

from pydantic import BaseModel, ConfigDict
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from pipeline.hub.cards import parse_card
from pipeline.hub.http_json import read_json


class Readme(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    content: str


def routes() -> list[Route]:
    return [Route("/api/validate-yaml", validate_yaml, methods=["POST"])]


async def validate_yaml(request: Request) -> Response:
    """Answers 400 if the README has errors, so that the client does not commit it. With warnings
    only, the client may commit it."""
    body = await read_json(request, Readme)
    card = await run_in_threadpool(parse_card, body.content)
    return JSONResponse(
        {
            "errors": [{"message": message} for message in card.errors],
            "warnings": [{"message": message} for message in card.warnings],
        },
        status_code=400 if card.errors else 200,
    )
