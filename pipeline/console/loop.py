"""The page `/`: the loop of each pipeline, from the last commit to the servers."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from pipeline.console.page import ConsoleOf, Page, page

router = APIRouter(route_class=Page)


@router.get("/")
def show_loop(request: Request, console: ConsoleOf) -> Response:
    return page(request, "loop.html")
