"""A client that asks for answers all the time: none may be mixed, and none lost to a swap."""

import json
import threading

import httpx

from tests.soak.stack import StackUnderFire, until

ASK_SECONDS = 60.0
END_SECONDS = 30.0
"""A server that answered badly because it ends is gone by then: one that hangs is killed."""
PAUSE_SECONDS = 0.1


class Asker:
    """Asks and streams in turn until `close`.

    A request may fail in two cases only: the server process has not answered any request yet (it
    starts, or there is no release), with 503 or without an answer; or it was ended during the
    request, by a kill or by its stack.
    """

    def __init__(self, stack: StackUnderFire) -> None:
        self._stack = stack
        self._answered_by: int | None = None
        """The process of the server that has answered, and so must answer on."""
        self._error: AssertionError | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._ask_on, daemon=True)
        self._thread.start()

    def check(self) -> None:
        if self._error is not None:
            raise self._error
        assert self._thread.is_alive(), "the client that asks has died"

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _ask_on(self) -> None:
        is_stream = False
        with httpx.Client(timeout=ASK_SECONDS) as client:
            while not self._closed.wait(PAUSE_SECONDS):
                is_stream = not is_stream
                try:
                    self._ask(client, is_stream)
                except AssertionError as error:
                    self._error = error
                    return

    def _ask(self, client: httpx.Client, is_stream: bool) -> None:
        pid = self._server()
        body = {"model": "facts", "prompt": "Shelf 0-0 holds", "max_tokens": 16, "temperature": 0}
        url = f"{self._stack.workplace.url('serving')}/v1/completions"
        try:
            answer = client.post(url, json=body | {"stream": is_stream})
        except httpx.TransportError as error:
            self._excuse(pid, repr(error))
            return
        if answer.status_code != 200:
            assert answer.status_code == 503, f"{answer.status_code}: {answer.text}"
            self._excuse(pid, f"503: {answer.text}")
            return
        told = _lines(answer.text) if is_stream else [answer.text]
        if is_stream and told.pop() != "[DONE]":
            self._excuse(pid, f"a stream without its end: {answer.text}")
            return
        fingerprints = {json.loads(each).get("system_fingerprint") for each in told}
        release = answer.headers["X-Model-Release"]
        assert fingerprints == {release}, f"{release} answered as {fingerprints}"
        self._answered_by = pid
        self._stack.counts["answers"] += 1

    def _server(self) -> int | None:
        """The process of the server; None where there is none, or one is on its way out."""
        if self._answered_by is not None and self._stack.is_alive(self._answered_by):
            return self._answered_by
        self._answered_by = None
        found = self._stack.victims()["serve"]
        return found[0] if len(found) == 1 else None

    def _excuse(self, pid: int | None, why: str) -> None:
        """Raises AssertionError where a server that has answered goes on without this answer."""
        if pid is not None and pid == self._answered_by:
            until(
                lambda: not self._stack.is_alive(pid),
                END_SECONDS,
                f"the server that fails to answer ends: {why}",
            )


def _lines(stream: str) -> list[str]:
    return [
        line.removeprefix("data: ") for line in stream.splitlines() if line.startswith("data: ")
    ]
