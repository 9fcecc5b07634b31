"""Lets a server serve what the branch `main` of a model repository on a hub is: looks again and
again whether it moved, fetches the release, and asks for the swap.

While the hub is away, the server serves on. After an error that another try would only repeat, such
as a refused swap, the same commit is tried again only when somebody asks for it.
"""

import asyncio
import logging
import os
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx

from serving.errors import ReleaseError, first_line
from serving.swap import Swapper
from serving.weights import fetch
from serving.weights.release_store import prune

logger = logging.getLogger(__name__)

REVISION = "main"
RENEW_SECONDS = 20.0
NUM_KEPT = 3
"""How many of the newest releases stay on the disk; the served one stays in any case."""


class _Failure(Exception):
    """The release of a commit is not served."""

    def __init__(self, message: str, *, is_final: bool) -> None:
        super().__init__(message)
        self.is_final = is_final
        """Whether another try would fail in the same way."""


@dataclass(kw_only=True)
class Follower:
    source: fetch.Source
    seconds: float
    """How long to wait between two looks."""
    secret: str = field(repr=False)
    """Who knows it may ask for a look at once."""
    name: str
    """Names this server in the hub's list of followers."""
    url: str
    """The address of this server, for the same list."""
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    _ended: str | None = None
    """The last commit that is served, or that no other try would help."""
    _error: str | None = None
    """Why the newest commit is not served."""
    _said: str | None = None
    """The problem that was logged last, so that it is not logged at each look."""
    _is_listed: bool = True
    """Whether the hub lists followers. The Hugging Face Hub does not."""

    def wake(self) -> None:
        """Look at once, and also try again what failed."""
        self._ended = None
        self._wake.set()

    async def run(self, swapper: Swapper) -> None:
        async with httpx.AsyncClient(**self.source.client_options) as http:
            while True:
                self._wake.clear()
                problem = None
                try:
                    await self._look(http, swapper)
                    problem = self._error
                except httpx.HTTPStatusError as error:
                    answer = error.response
                    said = answer.headers.get("X-Error-Message", answer.reason_phrase)
                    problem = f"{answer.url}: {answer.status_code} {said}"
                except httpx.HTTPError as error:
                    problem = f"{self.source.endpoint} does not answer: {first_line(error)}"
                except (ValueError, KeyError):
                    problem = f"{self.source.endpoint} does not answer as a hub; check --endpoint"
                except Exception as error:
                    problem = f"{type(error).__name__}: {first_line(error)}"
                    logger.debug("following %s", self.source.repo, exc_info=True)
                self._log(problem)
                with suppress(TimeoutError):
                    async with asyncio.timeout(self.seconds):
                        await self._wake.wait()

    def _log(self, problem: str | None) -> None:
        if problem == self._said:
            return
        self._said = problem
        if problem is None:
            logger.info("following %s again", self.source.repo)
        else:
            logger.warning("cannot follow %s for now: %s", self.source.repo, problem)

    async def _look(self, http: httpx.AsyncClient, swapper: Swapper) -> None:
        answer = await http.get(self.source.api_url(f"revision/{REVISION}"))
        commit = answer.raise_for_status().json()["sha"]
        if commit != self._ended:
            self._error, is_final = None, True
            try:
                await self._serve(http, swapper, commit)
            except _Failure as failure:
                self._error, is_final = str(failure)[:1000], failure.is_final
            if is_final and not self._wake.is_set():
                self._ended = commit
        live = swapper.admission.live
        await self._told(http, "", release=live and live.id, error=self._error)

    async def _serve(self, http: httpx.AsyncClient, swapper: Swapper, commit: str) -> None:
        release_id = await self._fetched(swapper, commit)
        live = swapper.admission.live
        if live is not None and live.id == release_id:
            return
        # A server that answers nothing yet need not wait.
        while live is not None and (seconds := await self._turn(http)):
            await asyncio.sleep(seconds)
        keeping = asyncio.create_task(self._keep_turn(http))
        try:
            result = await swapper.swap(release_id)
        finally:
            keeping.cancel()
        if result.result != "live":
            reasons = "; ".join(result.reasons)
            is_final = result.result in ("refused", "superseded")
            raise _Failure(f"{release_id}: {result.result}: {reasons}", is_final=is_final)
        try:
            await asyncio.to_thread(prune, swapper.pipeline_dir, NUM_KEPT)
        except (ReleaseError, OSError) as error:
            logger.warning("old releases are not removed: %s", error)

    async def _fetched(self, swapper: Swapper, commit: str) -> str:
        """The id of the commit's release, which is on the disk after this."""
        source = self.source
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", fetch.__name__),
            *(str(swapper.pipeline_dir), source.endpoint, source.repo, commit),
            env={**os.environ, "HF_TOKEN": source.token or ""},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            output, errors = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode:
            said = errors.decode(errors="replace").strip().splitlines() or [str(process.returncode)]
            raise _Failure(said[-1], is_final=process.returncode != fetch.EXIT_LATER)
        return output.decode().strip()

    async def _turn(self, http: httpx.AsyncClient) -> float:
        """Asks for a turn to swap, or for more time: the followers of one repository swap one after
        another. Returns 0 if it may swap now, or else after how many seconds to ask again."""
        answer = await self._told(http, "/turn")
        return answer["wait_seconds"] if answer else 0.0

    async def _keep_turn(self, http: httpx.AsyncClient) -> None:
        while True:
            await asyncio.sleep(RENEW_SECONDS)
            with suppress(httpx.HTTPError):
                await self._turn(http)

    async def _told(self, http: httpx.AsyncClient, route: str, **facts: Any) -> Any:
        """The hub's answer to what this server tells of itself; None if it does not list followers.
        Raises httpx.HTTPError."""
        if not self._is_listed:
            return None
        body = {"name": self.name, "url": self.url, **facts}
        answer = await http.post(self.source.api_url(f"followers{route}"), json=body)
        # This hub has just answered for this repository, so it is the route that it does not have.
        self._is_listed = answer.status_code not in (404, 405, 501)
        return answer.raise_for_status().json() if self._is_listed else None
