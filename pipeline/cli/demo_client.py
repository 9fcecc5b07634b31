"""The demo's client: requests one completion after another, and records for each answer which
release gave it."""

import itertools
import json
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import httpx

from pipeline.errors import PipelineError

MAX_TOKENS = 12
PAUSE_SECONDS = 0.05
"""The pause between two requests. Without the pause, the server would use a whole core for this
client, and the training would be slower."""
WAIT_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class Reply:
    text: str
    release: str
    first_token_at: float
    """When the first token arrived (Unix time)."""


def ask(server_url: str, name: str, prompt: str) -> Reply:
    """Request one completion as a stream, at temperature 0. `name` is the pipeline's name.

    Raises httpx.HTTPError. Raises PipelineError if the server breaks the answer off, or if the
    answer does not come from exactly one release.
    """
    body = {
        "model": name,
        "prompt": prompt,
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "stop": "\n",
        "stream": True,
    }
    text: list[str] = []
    fingerprints: set[str] = set()
    first_token_at = 0.0
    with httpx.stream(
        "POST", f"{server_url}/v1/completions", json=body, timeout=60, trust_env=False, verify=False
    ) as response:
        if response.is_error:
            response.read()
            response.raise_for_status()
        for line in response.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                raise PipelineError(f"the server broke the answer off: {chunk['error']}")
            first_token_at = first_token_at or time.time()
            fingerprints.add(chunk["system_fingerprint"])
            text.extend(choice["text"] for choice in chunk["choices"])
    if len(fingerprints) != 1:
        raise PipelineError(f"one answer came from {len(fingerprints)} releases: {fingerprints}")
    return Reply(text="".join(text), release=fingerprints.pop(), first_token_at=first_token_at)


class Client:
    """Sends the prompts again and again, in its own thread, until the `with` block ends."""

    def __init__(self, server_url: str, name: str, prompts: Sequence[str]) -> None:
        self._server_url, self._name, self._prompts = server_url, name, prompts
        self._replies: list[Reply] = []
        self._failures: list[str] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._send, name="demo-client")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def wait_for(self, release: str) -> float:
        """Wait for an answer from this release; returns when its first token arrived (Unix time).
        Raises PipelineError if no such answer comes within WAIT_SECONDS."""
        deadline = time.monotonic() + WAIT_SECONDS
        while time.monotonic() < deadline:
            for reply in self._replies:
                if reply.release == release:
                    return reply.first_token_at
            time.sleep(PAUSE_SECONDS)
        raise PipelineError(f"no answer came from {release} within {WAIT_SECONDS:g} s")

    def summary(self) -> dict[str, Any]:
        return {
            "sent": len(self._replies) + len(self._failures),
            "failed": len(self._failures),
            "by_release": dict(Counter(reply.release for reply in self._replies)),
            "failures": self._failures[:5],
        }

    def _send(self) -> None:
        for prompt in itertools.cycle(self._prompts):
            try:
                self._replies.append(ask(self._server_url, self._name, prompt))
            except (httpx.HTTPError, PipelineError, ValueError, KeyError) as error:
                self._failures.append(f"{type(error).__name__}: {error}")
            if self._stop.wait(PAUSE_SECONDS):
                return
