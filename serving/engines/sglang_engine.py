"""`SglangEngine`: generates with an SGLang server, the upstream, which loads weights from the
folder of a release.

You start the upstream yourself, on a model of the same network. It must see the releases under the
same paths as our server. It loads weights from disk, without checks, while no request runs. So
`stage` checks the files first. After a restart, the upstream runs other weights than those that
were committed. The next answer shows this; then the engine has failed until this server is started
again, which `pipeline up` does. The upstream's logprobs include the temperature, unless it is
started with `SGLANG_RETURN_ORIGINAL_LOGPROB=1`.
"""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx

from serving.engine import (
    EngineError,
    Generation,
    GenerationRefused,
    StageError,
    Step,
    TokenLogprob,
    reported_logprob,
)
from serving.engines.same_network import config_differences, tensor_differences
from serving.errors import ReleaseError, first_line
from serving.weights.release import RELEASE_FILE, Release
from serving.weights.release_store import load_release
from serving.weights.shards import not_finite

_ANSWER_SECONDS = 30
_UPDATE_SECONDS = 600


class SglangEngine:
    """Call all methods but `dtype_of` on one event loop."""

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
        """The release that was committed last."""
        self.failure: str | None = None

    async def take_turn(self) -> None:
        """Nothing hangs, because this server computes nothing."""
        if self.failure is not None:
            raise EngineError(self.failure)

    async def stage(self, release: Release, folder: Path) -> None:
        """Asks the upstream which model it runs, then checks the files of the release.

        Raises StageError if the release does not fit that model, and EngineError if the upstream
        does not answer."""
        info = await self._ask("GET", "/model_info", _ANSWER_SECONDS)
        running = Path(str(info.get("model_path")))
        try:
            if reasons := await asyncio.to_thread(_differences, running, release, folder):
                raise StageError(*reasons, f"start {self._upstream} again on the other network")
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
        body = {
            "model_path": str(self._folders[release_id]),
            "weight_version": release_id,
            # No request should run. If one does, it is not aborted, and generation is not left
            # paused.
            "abort_all_requests": False,
            "keep_pause": False,
            "flush_cache": True,
        }
        answer = await self._ask("POST", "/update_weights_from_disk", _UPDATE_SECONDS, body)
        if not answer.get("success"):
            raise EngineError(f"{self._upstream} kept its weights: {answer.get('message')}")
        info = await self._ask("GET", "/model_info", _ANSWER_SECONDS)
        if (runs := info.get("weight_version")) != release_id:
            raise EngineError(
                f"{self._upstream} says that it runs {runs!r} after an update to {release_id}"
            )
        self._live, self.failure = release_id, None

    async def unload(self, release_id: str) -> None:
        """Forgets the folder. There is no memory to free, because the upstream holds only the live
        release."""
        self._folders.pop(release_id, None)

    async def generate(self, release_id: str, generation: Generation) -> AsyncGenerator[Step, None]:
        """Raises EngineError. If the iterator is closed, so is the connection, and then the
        upstream ends the sequence."""
        refuse_constraints(generation, "sglang")
        self._check_version(str(self._live), release_id)
        num_tokens, is_first, is_over = 0, True, False
        try:
            async with aclosing(self._events(_request_of(generation))) as events:
                async for chunk in events:
                    self._check_version(chunk["meta_info"].get("weight_version"), release_id)
                    step = _step_of(chunk, generation, num_tokens, is_first=is_first)
                    num_tokens += len(step.token_ids)
                    is_first, is_over = False, step.finish_reason is not None
                    yield step
        except httpx.HTTPError as error:
            raise EngineError(f"{self._upstream}: {first_line(error)}") from error
        if not is_over:
            raise EngineError(f"{self._upstream} broke the answer off")

    def _check_version(self, version: str | None, release_id: str) -> None:
        if version is None:
            raise EngineError("SGLang names no weight_version beside its tokens")
        if version != release_id:
            self.failure = f"{self._upstream} runs {version} in place of {release_id}"
            raise EngineError(self.failure)

    async def close(self) -> None:
        await self._http.aclose()

    async def _events(self, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
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

    async def _ask(self, method: str, path: str, seconds: float, body: Any = None) -> Any:
        """The body of the answer. Raises EngineError."""
        try:
            answer = await self._http.request(method, path, json=body, timeout=seconds)
            # A refused update has status 400, and its body has the usual form with the reason.
            if answer.status_code != 400:
                answer.raise_for_status()
            return answer.json()
        except (httpx.HTTPError, ValueError) as error:
            raise EngineError(
                f"no SGLang server at {self._upstream}{path}: {first_line(error)}"
            ) from error


def refuse_constraints(generation: Generation, engine: str) -> None:
    """Raise GenerationRefused if `generation` has a grammar or `allowed_token_ids`."""
    param = "allowed_token_ids" if generation.allowed_token_ids is not None else None
    if generation.grammar is not None:
        param = generation.grammar.param
    if param is not None:
        raise GenerationRefused(f"not supported by the engine {engine}; leave it out", param=param)


def _differences(running: Path, release: Release, folder: Path) -> list[str]:
    """The differences between the upstream's model and the release. They cannot all be found if the
    upstream's model is on another machine or is not a release. Raises ReleaseError."""
    reasons: list[str] = []
    if (running / "config.json").is_file():
        reasons += config_differences(running, folder, "the upstream")
    if (running / RELEASE_FILE).is_file():
        reasons += tensor_differences(load_release(running), release, "the upstream")
    return reasons


def _request_of(generation: Generation) -> dict[str, Any]:
    wants = [generation.num_logprobs, generation.num_prompt_logprobs]
    return {
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
            # `stop_token_ids` has the end-of-sequence ids, unless the request ignores them.
            "ignore_eos": True,
            "skip_special_tokens": False,
        },
    }


def _step_of(
    chunk: dict[str, Any], generation: Generation, num_earlier: int, *, is_first: bool
) -> Step:
    """Convert a chunk. Raises EngineError if SGLang ended the sequence for another reason than
    `stop` or `length`.

    By default a chunk has all tokens of the answer so far. If the upstream streams differences, it
    has only the new tokens. In both cases the new tokens are the last ones.
    """
    meta = chunk["meta_info"]
    reason = (meta.get("finish_reason") or {}).get("type")
    if reason not in (None, "stop", "length"):
        raise EngineError(f"SGLang ended the sequence: {meta['finish_reason']}")
    num_new = meta["completion_tokens"] - num_earlier
    logprobs: tuple[TokenLogprob, ...] = ()
    if generation.num_logprobs is not None and num_new:
        logprobs = _logprobs(meta, "output", generation.num_logprobs)[-num_new:]
    prompt_logprobs = None
    if generation.num_prompt_logprobs is not None and is_first:
        prompt_logprobs = _logprobs(meta, "input", generation.num_prompt_logprobs)
    return Step(
        token_ids=tuple(chunk["output_ids"][-num_new:]) if num_new else (),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        finish_reason=reason,
        num_cached_tokens=meta.get("cached_tokens", 0) if is_first else 0,
    )


def _logprobs(meta: dict[str, Any], side: str, num_top: int) -> tuple[TokenLogprob, ...]:
    """SGLang gives `[logprob, token id, text]` for each token. The logprob of the first prompt
    token is None."""
    tops = meta.get(f"{side}_top_logprobs") or []
    found = []
    for number, (logprob, token_id, _) in enumerate(meta[f"{side}_token_logprobs"]):
        if logprob is None:
            continue
        top = (tops[number] or [])[:num_top] if number < len(tops) else []
        found.append(
            TokenLogprob(
                token_id=token_id,
                logprob=reported_logprob(logprob),
                top=tuple((other, reported_logprob(value)) for value, other, _ in top),
            )
        )
    return tuple(found)
