"""`SglangEngine`: an SGLang server behind ours, which takes its weights from a release's folder.

The upstream is started by whoever runs it, on a model of the same network, and must see the
releases under the same paths. It reads the weights from disk while nothing runs; `stage` has them
in the page cache by then. One that was started again is told again what to serve, once it answers
from other weights. Its logprobs follow the temperature unless it is started with
`SGLANG_RETURN_ORIGINAL_LOGPROB=1`.
"""

import asyncio
import json
import logging
import os
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

import httpx

from serving.engine import EngineError, Generation, StageError, Step, TokenLogprob
from serving.weights.release import Release

_log = logging.getLogger(__name__)

_ANSWER_SECONDS = 30
_UPDATE_SECONDS = 600
_READ_BYTES = 1 << 22


class _OtherWeights(Exception):
    """The upstream computed with other weights than it was asked for."""


class SglangEngine:
    """Called on one event loop."""

    holds_two = False
    checks_digests = False
    # The update, and the question whether it was one.
    commit_seconds: float | None = _UPDATE_SECONDS + _ANSWER_SECONDS

    def __init__(self, upstream: str) -> None:
        self._upstream = upstream.rstrip("/")
        self._http = httpx.AsyncClient(
            base_url=self._upstream,
            timeout=httpx.Timeout(_ANSWER_SECONDS, read=None),
            limits=httpx.Limits(max_connections=None),
            trust_env=False,
        )
        self._folders: dict[str, Path] = {}
        self._live: str | None = None
        """What was committed last: what the upstream has to run, whatever it does run."""
        self._updating = asyncio.Lock()

    async def stage(self, release: Release, folder: Path) -> None:
        """Asks the upstream what it runs, and reads the release's files once."""
        info = await self._model_info()
        running = Path(str(info.get("model_path")), "config.json")
        if running.is_file() and (reasons := _differences(running, folder / "config.json")):
            raise StageError(*reasons, f"start {self._upstream} again on the other network")
        await asyncio.to_thread(_read_once, [folder / name for name in release.files])
        self._folders[release.id] = folder.resolve()

    def max_context(self, release_id: str) -> int | None:
        return None

    async def commit(self, release_id: str) -> None:
        if release_id not in self._folders:
            raise EngineError(f"{release_id} is not staged")
        self._live = release_id
        async with self._updating:
            await self._update(release_id)

    async def unload(self, release_id: str) -> None:
        """The upstream holds one release; there is nothing to free."""
        self._folders.pop(release_id, None)

    async def generate(self, release_id: str, generation: Generation) -> AsyncGenerator[Step, None]:
        has_begun = False
        try:
            async with aclosing(self._answer(release_id, generation)) as steps:
                async for step in steps:
                    has_begun = True
                    yield step
            return
        except _OtherWeights as error:
            if has_begun:
                raise EngineError(str(error)) from None
        await self._put_right(release_id)
        try:
            async with aclosing(self._answer(release_id, generation)) as steps:
                async for step in steps:
                    yield step
        except _OtherWeights as error:
            raise EngineError(str(error)) from None

    async def _answer(self, release_id: str, generation: Generation) -> AsyncGenerator[Step, None]:
        """Raises EngineError, _OtherWeights."""
        if release_id != self._live:
            raise EngineError(f"{self._upstream} has to run {self._live}, not {release_id}")
        request_id = uuid4().hex
        so_far = _SoFar()
        is_over = False
        try:
            async for chunk in self._events(_request(generation, request_id)):
                step = _step(chunk, generation, release_id, so_far)
                is_over = step.finish_reason is not None
                yield step
            if not is_over:
                raise EngineError(f"{self._upstream} broke the answer off")
        except httpx.HTTPError as error:
            is_over = True
            raise EngineError(f"{self._upstream}: {_said(error)}") from error
        finally:
            if not is_over:
                await self._abort(request_id)

    async def _put_right(self, release_id: str) -> None:
        """Once for all whose answers came from other weights."""
        async with self._updating:
            if release_id != self._live or await self._weight_version() == release_id:
                return
            _log.warning("%s lost %s; it is told again", self._upstream, release_id)
            await self._update(release_id)

    async def _update(self, release_id: str) -> None:
        folder = self._folders[release_id]
        answer = await self._post(
            "/update_weights_from_disk",
            {
                "model_path": str(folder),
                "weight_version": release_id,
                # Nothing runs; and should anything, it is neither aborted nor left half paused.
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
            # It sees the closed connection too, and nobody is left to be told.
            return

    async def _model_info(self) -> dict[str, Any]:
        try:
            answer = await self._http.get("/model_info", timeout=_ANSWER_SECONDS)
            answer.raise_for_status()
            return cast(dict[str, Any], answer.json())
        except (httpx.HTTPError, ValueError) as error:
            raise EngineError(f"no SGLang server at {self._upstream}: {_said(error)}") from error

    async def _post(
        self, path: str, body: dict[str, Any], *, seconds: float = _ANSWER_SECONDS
    ) -> dict[str, Any]:
        try:
            answer = await self._http.post(path, json=body, timeout=seconds)
            # A refused update is 400, with the reason in a body of the usual shape.
            return cast(dict[str, Any], answer.json()) if answer.content else {}
        except (httpx.HTTPError, ValueError) as error:
            raise EngineError(f"{self._upstream}{path}: {_said(error)}") from error


@dataclass
class _SoFar:
    num_tokens: int = 0
    has_begun: bool = False


def _request(generation: Generation, request_id: str) -> dict[str, Any]:
    wants = [generation.num_logprobs, generation.num_prompt_logprobs]
    return {
        "rid": request_id,
        "input_ids": list(generation.prompt),
        "stream": True,
        "return_logprob": any(each is not None for each in wants),
        "logprob_start_len": 0 if generation.num_prompt_logprobs is not None else -1,
        "top_logprobs_num": max(each or 0 for each in wants),
        "sampling_params": {
            "max_new_tokens": generation.max_tokens,
            "min_new_tokens": generation.min_tokens,
            "temperature": generation.temperature,
            "top_p": generation.top_p,
            "top_k": generation.top_k or -1,
            "min_p": generation.min_p,
            "presence_penalty": generation.presence_penalty,
            "frequency_penalty": generation.frequency_penalty,
            "repetition_penalty": generation.repetition_penalty,
            "logit_bias": {str(token): bias for token, bias in generation.logit_bias.items()}
            or None,
            "sampling_seed": generation.seed,
            "stop_token_ids": list(generation.stop_token_ids) or None,
            # End-of-sequence ids are among the stop ids, where the request wants them.
            "ignore_eos": True,
            "skip_special_tokens": False,
        },
    }


def _step(chunk: dict[str, Any], generation: Generation, release_id: str, so_far: _SoFar) -> Step:
    """A chunk has all tokens until then or, where the upstream streams differences, the new ones:
    either way the new ones are the last."""
    meta = chunk["meta_info"]
    version = meta.get("weight_version")
    if version is None:
        raise EngineError("SGLang names no weight_version beside its tokens")
    if version != release_id:
        raise _OtherWeights(f"tokens of {version} in an answer of {release_id}")
    reason = (meta.get("finish_reason") or {}).get("type")
    if reason not in (None, "stop", "length"):
        raise EngineError(f"SGLang ended the sequence: {meta['finish_reason']}")
    num_new = meta["completion_tokens"] - so_far.num_tokens
    so_far.num_tokens += num_new
    token_ids = tuple(chunk["output_ids"][-num_new:]) if num_new else ()
    logprobs: tuple[TokenLogprob, ...] = ()
    if generation.num_logprobs is not None and num_new:
        logprobs = _logprobs(meta, "output", generation.num_logprobs)[-num_new:]
    prompt_logprobs = None
    if generation.num_prompt_logprobs is not None and not so_far.has_begun:
        prompt_logprobs = _logprobs(meta, "input", generation.num_prompt_logprobs)
    is_first, so_far.has_begun = not so_far.has_begun, True
    return Step(
        token_ids=token_ids,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        finish_reason=reason,
        num_cached_tokens=meta.get("cached_tokens", 0) if is_first else 0,
    )


def _logprobs(meta: dict[str, Any], side: str, num_top: int) -> tuple[TokenLogprob, ...]:
    """`[logprob, token id, text]` for each token; the first of a prompt has none."""
    tops = meta.get(f"{side}_top_logprobs") or []
    found = []
    for number, (logprob, token_id, _) in enumerate(meta[f"{side}_token_logprobs"]):
        if logprob is None:
            continue
        top = (tops[number] or [])[:num_top] if number < len(tops) else []
        found.append(
            TokenLogprob(
                token_id=token_id,
                logprob=logprob,
                top=tuple((other, value) for value, other, _ in top),
            )
        )
    return tuple(found)


def _differences(running: Path, wanted: Path) -> list[str]:
    before, after = (json.loads(path.read_bytes()) for path in (running, wanted))
    sizes = ("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    heads = ("num_attention_heads", "num_key_value_heads", "head_dim", "tie_word_embeddings")
    return [
        f"config.json: {key} is {after.get(key)!r}, the upstream runs {before.get(key)!r}"
        for key in (*sizes, *heads)
        if before.get(key) != after.get(key)
    ]


def _read_once(paths: list[Path]) -> None:
    for path in paths:
        with path.open("rb") as file:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
            while file.read(_READ_BYTES):
                pass


def _said(error: Exception) -> str:
    return str(error) or type(error).__name__
