"""`SglangEngine`: generates with an SGLang server, the upstream, which loads weights from the
folder of a release.

You start the upstream yourself, on a model of the same network. It must see the releases under the
same paths as our server. It loads weights from disk, without checks, while no request runs. So
`stage` checks the files first, and reads them into the page cache. After a restart, the upstream
runs other weights than those that were committed. The next answer shows this, and the committed
weights are loaded again. Its logprobs include the temperature, unless it is started with
`SGLANG_RETURN_ORIGINAL_LOGPROB=1`.
"""

import asyncio
import json
import logging
import os
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

import httpx

from serving.engine import EngineError, Generation, StageError, Step, refuse_constraints
from serving.engines.same_network import config_differences, tensor_differences
from serving.engines.sglang_requests import StreamProgress, WrongWeights, request_of, step_of
from serving.errors import ReleaseError, first_line
from serving.weights.release import RELEASE_FILE, Release
from serving.weights.release_store import load_release
from serving.weights.shards import not_finite

_log = logging.getLogger(__name__)

_ANSWER_SECONDS = 30
_UPDATE_SECONDS = 600
_READ_BYTES = 1 << 22


class SglangEngine:
    """All methods must be called on one event loop."""

    holds_two = False
    checks_digests = False
    # The time limits of the update and of the question that checks it.
    commit_seconds: float | None = _UPDATE_SECONDS + _ANSWER_SECONDS
    kv_cache_usage: float | None = None

    def __init__(self, upstream: str, dtype: str = "auto") -> None:
        """`dtype` is the one that the upstream was started with. `auto` means the dtype of the
        weights, as it does for SGLang."""
        self._upstream = upstream.rstrip("/")
        self._http = httpx.AsyncClient(
            base_url=self._upstream,
            timeout=httpx.Timeout(_ANSWER_SECONDS, read=None),
            limits=httpx.Limits(max_connections=None),
            trust_env=False,
        )
        self._dtype = dtype
        self._folders: dict[str, Path] = {}
        self._live: str | None = None
        """The release that was committed last. The upstream must run it, but may have been
        restarted on another one."""
        self._updating = asyncio.Lock()

    @property
    def failure(self) -> str | None:
        return None

    async def take_turn(self) -> None:
        """Does nothing. This server computes nothing, and restarting it would not help the
        upstream."""

    async def stage(self, release: Release, folder: Path) -> None:
        """Asks the upstream which model it runs, then checks and reads the files of the release.
        Raises StageError if the release does not fit that model, and EngineError if the upstream
        does not answer."""
        running = Path(str((await self._model_info()).get("model_path")))
        try:
            if reasons := await asyncio.to_thread(_differences, running, release, folder):
                raise StageError(*reasons, f"start {self._upstream} again on the other network")
            await asyncio.to_thread(_read_once, [folder / name for name in release.files])
            if reasons := await asyncio.to_thread(not_finite, release, folder):
                raise StageError(*reasons)
        except ReleaseError as error:
            raise StageError(*error.reasons) from error
        self._folders[release.id] = folder.resolve()

    def dtype_of(self, release: Release) -> str:
        return release.stored_dtype if self._dtype == "auto" else self._dtype

    def max_context(self, release_id: str) -> int | None:
        return None

    async def commit(self, release_id: str) -> None:
        if release_id not in self._folders:
            raise EngineError(f"{release_id} is not staged")
        self._live = release_id
        async with self._updating:
            await self._update(release_id)

    async def unload(self, release_id: str) -> None:
        """Forgets the folder. There is no memory to free, because the upstream holds only the live
        release."""
        self._folders.pop(release_id, None)

    async def generate(self, release_id: str, generation: Generation) -> AsyncGenerator[Step, None]:
        refuse_constraints(generation, "sglang")
        for may_retry in (True, False):
            has_begun = False
            try:
                async with aclosing(self._answer(release_id, generation)) as steps:
                    async for step in steps:
                        has_begun = True
                        yield step
                return
            except WrongWeights as error:
                if has_begun or not may_retry:
                    raise EngineError(str(error)) from None
            await self._restore_weights(release_id)

    async def _answer(self, release_id: str, generation: Generation) -> AsyncGenerator[Step, None]:
        """Raises EngineError. Raises WrongWeights if the upstream computed with other weights."""
        if release_id != self._live:
            raise EngineError(f"{release_id} is not live on {self._upstream}, but {self._live} is")
        request_id = uuid4().hex
        progress = StreamProgress()
        is_over = False
        try:
            async for chunk in self._events(request_of(generation, request_id)):
                step = step_of(chunk, generation, release_id, progress)
                is_over = step.finish_reason is not None
                yield step
            if not is_over:
                raise EngineError(f"{self._upstream} broke the answer off")
        except httpx.HTTPError as error:
            is_over = True
            raise EngineError(f"{self._upstream}: {first_line(error)}") from error
        finally:
            if not is_over:
                await self._abort(request_id)

    async def _restore_weights(self, release_id: str) -> None:
        """Load the weights of the release again. Several requests may notice the wrong weights at
        the same time; only the first one loads them."""
        async with self._updating:
            if release_id != self._live or await self._weight_version() == release_id:
                return
            _log.warning("%s lost the weights of %s; loading again", self._upstream, release_id)
            await self._update(release_id)

    async def _update(self, release_id: str) -> None:
        folder = self._folders[release_id]
        answer = await self._post(
            "/update_weights_from_disk",
            {
                "model_path": str(folder),
                "weight_version": release_id,
                # No request should run. If one does, it is not aborted, and generation is not left
                # paused.
                "abort_all_requests": False,
                "keep_pause": False,
                "flush_cache": True,
            },
            seconds=_UPDATE_SECONDS,
        )
        if not answer.get("success"):
            raise EngineError(f"{self._upstream} kept its weights: {answer.get('message')}")
        if (runs := await self._weight_version()) != release_id:
            raise EngineError(
                f"{self._upstream} says that it runs {runs!r} after an update to {release_id}"
            )

    async def _weight_version(self) -> str | None:
        return (await self._model_info()).get("weight_version")

    async def close(self) -> None:
        await self._http.aclose()

    async def _events(self, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        async with self._http.stream("POST", "/generate", json=body) as answer:
            if answer.status_code != 200:
                text = (await answer.aread()).decode(errors="replace")[:300]
                raise EngineError(f"{self._upstream}: {answer.status_code} {text}")
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    return
                if line.startswith("data:"):
                    chunk = json.loads(line[5:])
                    if "error" in chunk:
                        raise EngineError(f"{self._upstream}: {chunk['error']}")
                    yield chunk

    async def _abort(self, request_id: str) -> None:
        try:
            await self._post("/abort_request", {"rid": request_id})
        except EngineError:
            # The upstream also sees that the connection is closed.
            return

    async def _model_info(self) -> dict[str, Any]:
        try:
            answer = await self._http.get("/model_info", timeout=_ANSWER_SECONDS)
            answer.raise_for_status()
            return cast(dict[str, Any], answer.json())
        except (httpx.HTTPError, ValueError) as error:
            raise EngineError(
                f"no SGLang server at {self._upstream}: {first_line(error)}"
            ) from error

    async def _post(
        self, path: str, body: dict[str, Any], *, seconds: float = _ANSWER_SECONDS
    ) -> dict[str, Any]:
        try:
            answer = await self._http.post(path, json=body, timeout=seconds)
            # A refused update has status 400, and its body has the usual form with the reason.
            return cast(dict[str, Any], answer.json()) if answer.content else {}
        except (httpx.HTTPError, ValueError) as error:
            raise EngineError(f"{self._upstream}{path}: {first_line(error)}") from error


def _differences(running: Path, release: Release, folder: Path) -> list[str]:
    """The differences between the upstream's model and the release. They cannot all be found if the
    upstream's model is on another machine or is not a release. Raises ReleaseError."""
    reasons: list[str] = []
    if (running / "config.json").is_file():
        reasons += config_differences(running, folder, "the upstream")
    if (running / RELEASE_FILE).is_file():
        reasons += tensor_differences(load_release(running), release, "the upstream")
    return reasons


def _read_once(paths: list[Path]) -> None:
    for path in paths:
        with path.open("rb") as file:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
            while file.read(_READ_BYTES):
                pass
