"""What a job makes of the server's answers, over a real socket."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, Request, Response

from pipeline.retrain.errors import PromoteError, SwapMaySucceedLater, TemporaryError
from pipeline.retrain.run import Promotion, promote
from serving.swap_schemas import SwapRequest, SwapResult, SwapResultName
from serving.weights.release_store import clear_pending, pending_release, set_current, set_pending
from tests.serving_fixtures import running

RELEASE, EARLIER = "r000003-0123abcd", "r000001-0123abcd"
FIRST = (None, RELEASE)
"""What may be chosen before a first release."""
Answer = tuple[int, SwapResult | str]


@contextmanager
def server(answer: Callable[[], Answer]) -> Iterator[tuple[str, list[str | None]]]:
    """Answers every swap with what `answer` gives; notes the tokens that it was sent."""
    app = FastAPI()
    tokens: list[str | None] = []

    @app.post("/admin/swap")
    async def swap(wanted: SwapRequest, request: Request) -> Response:
        assert wanted.release == RELEASE and RELEASE in (wanted.instead_of or ())
        tokens.append(request.headers.get("authorization"))
        status, body = answer()
        text = body if isinstance(body, str) else body.model_dump_json()
        return Response(text, status_code=status, media_type="application/json")

    with running(app) as url:
        yield url, tokens


def ask(folder: Path, url: str | None, **told: Any) -> Promotion:
    usual: dict[str, Any] = {"instead_of": FIRST, "token": "secret", "patience_seconds": 0.0}
    return promote(folder, RELEASE, server_url=url, **usual | told)


def asked(folder: Path, *answers: Answer, patience_seconds: float = 0.0) -> Promotion:
    left = list(answers)
    with server(lambda: left.pop(0)) as (url, _):
        instead_of = (None, RELEASE, EARLIER)
        return ask(folder, url, instead_of=instead_of, patience_seconds=patience_seconds)


def test_a_release_is_marked_then_asked_for_with_the_token_and_promoted(tmp_path: Path) -> None:
    marked = []

    def answer() -> Answer:
        marked.append(pending_release(tmp_path))
        return 200, SwapResult(result="live", release=RELEASE, phase="live")

    with server(answer) as (url, tokens):
        found = ask(tmp_path, f"{url}/")
    assert found[0] == "promoted"
    assert (marked, tokens) == ([RELEASE], ["Bearer secret"])


def test_a_newer_release_supersedes(tmp_path: Path) -> None:
    newer = SwapResult(
        result="superseded", release=RELEASE, phase="preflight", superseded_by="r000004-0123abcd"
    )
    found = asked(tmp_path, (409, newer))
    assert found[0] == "superseded"
    assert "r000004" in str(found[1])
    assert pending_release(tmp_path) is None


def test_a_refusal_tells_every_reason(tmp_path: Path) -> None:
    refused = SwapResult(
        result="refused", release=RELEASE, phase="preflight", reasons=("a is short", "b is gone")
    )
    with pytest.raises(PromoteError, match=r"\(preflight\): a is short; b is gone") as caught:
        asked(tmp_path, (422, refused))
    assert not isinstance(caught.value, TemporaryError)


def test_a_deferred_swap_is_asked_for_again(tmp_path: Path) -> None:
    deferred = SwapResult(result="deferred", release=RELEASE, phase="barrier")
    live = SwapResult(result="live", release=RELEASE, phase="live")
    found = asked(tmp_path, (503, deferred), (200, live), patience_seconds=30)
    assert found[0] == "promoted"
    with pytest.raises(SwapMaySucceedLater, match="pipeline releases swap") as caught:
        asked(tmp_path, (503, deferred))
    assert isinstance(caught.value, TemporaryError), "the job gets another attempt"


def test_a_swap_that_failed_for_the_server_s_disk_or_engine_gets_another_attempt(
    tmp_path: Path,
) -> None:
    failed = SwapResult(
        result="failed", release=RELEASE, phase="probe", reasons=("current: no space is left",)
    )
    with pytest.raises(
        SwapMaySucceedLater, match=r"\(probe\): current: no space is left"
    ) as caught:
        asked(tmp_path, (500, failed))
    assert isinstance(caught.value, TemporaryError)


@pytest.mark.parametrize("is_served", [True, False])
@pytest.mark.parametrize(
    "chosen", [EARLIER, pytest.param("r000002-0123abcd", id="the parent, which is still live")]
)
def test_a_release_that_somebody_chose_meanwhile_stands(
    tmp_path: Path, is_served: bool, chosen: str
) -> None:
    set_current(tmp_path, "r000002-0123abcd")
    deferred = SwapResult(result="deferred", release=RELEASE, phase="barrier")

    def defer() -> Answer:
        set_pending(tmp_path, chosen)
        if is_served:
            set_current(tmp_path, chosen)
            clear_pending(tmp_path, chosen)
        return 503, deferred

    with server(defer) as (url, asked_with):
        instead_of = ("r000002-0123abcd", RELEASE)
        found = ask(tmp_path, url, instead_of=instead_of, patience_seconds=30)
    assert found[0] == "superseded"
    assert f"{chosen} was taken instead" in str(found[1])
    assert len(asked_with) == 1
    assert pending_release(tmp_path) == (None if is_served else chosen)


@pytest.mark.parametrize(
    ("status", "body"), [(401, '{"error": {"message": "no"}}'), (404, "not here"), (500, "")]
)
def test_any_other_answer_fails_and_says_what_came(tmp_path: Path, status: int, body: str) -> None:
    with pytest.raises(PromoteError, match=f"answered {status}.*PIPELINE_ADMIN_TOKEN"):
        asked(tmp_path, (status, body))


@pytest.mark.parametrize("result", [None, "refused", "failed"])
@pytest.mark.parametrize("earlier", [EARLIER, RELEASE, None])
def test_after_a_refusal_or_a_wrong_answer_the_release_that_waited_before_is_pending_again(
    tmp_path: Path, earlier: str | None, result: SwapResultName | None
) -> None:
    if earlier is not None:
        set_pending(tmp_path, earlier)
    body = SwapResult(result=result, release=RELEASE, phase="preflight") if result else ""
    with pytest.raises(PromoteError):
        asked(tmp_path, (401, body))
    # The job has failed. So its own release may not stay pending, even if an earlier attempt of the
    # job marked it.
    assert pending_release(tmp_path) == (None if earlier == RELEASE else earlier)


def test_no_server_leaves_the_release_pending(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    for url in (None, f"http://127.0.0.1:{port}"):
        started = time.monotonic()
        found = ask(tmp_path, url)
        assert found[0] == "published"
        assert pending_release(tmp_path) == RELEASE
        assert time.monotonic() - started < 5


def test_a_server_that_dies_during_the_swap_leaves_the_release_pending(tmp_path: Path) -> None:
    listener = socket.create_server(("127.0.0.1", 0))

    def hang_up() -> None:
        connection, _ = listener.accept()
        connection.recv(100)
        connection.close()
        listener.close()

    thread = threading.Thread(target=hang_up)
    thread.start()
    found = ask(tmp_path, f"http://127.0.0.1:{listener.getsockname()[1]}")
    thread.join()
    assert found[0] == "published"
    assert pending_release(tmp_path) == RELEASE
