"""A server that keeps to SGLang's documented wire format, and computes as the echo engine does.

It refuses what SGLang refuses, keeps a log of the updates, and can be told to misbehave.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse

from serving.engine import Generation, Step, TokenLogprob
from serving.weights.release_store import load_release
from tests.echo_engine import EchoEngine

UPDATE_FIELDS = {
    "model_path", "load_format", "abort_all_requests", "weight_version", "is_async",
    "torch_empty_cache", "keep_pause", "recapture_cuda_graph", "token_step", "flush_cache",
    "manifest",
}  # fmt: skip


class SglangStandIn:
    def __init__(self, folder: Path, *, streams_differences: bool = False) -> None:
        self._engine = EchoEngine(holds_two=False, step_seconds=0.001)
        self._folder = folder
        self._version: str | None = "default"
        self._release_id: str | None = None
        self._streams_differences = streams_differences
        self.updates: list[dict[str, Any]] = []
        self.refuses_updates = False
        self.refuses_after: int | None = None
        """Every update after so many is refused."""
        self.update_seconds = 0.0
        self.ignores_updates = False
        self.breaks_off = False
        self.app = FastAPI()
        self.app.get("/model_info")(self._model_info)
        self.app.post("/update_weights_from_disk")(self._update)
        self.app.post("/generate")(self._generate)

    @property
    def num_running(self) -> int:
        return self._engine.num_running.total()

    def forget(self, version: str | None = "default") -> None:
        """What a restart leaves of an update; None is an upstream that has no such name at all."""
        self._version = version

    async def _model_info(self) -> dict[str, Any]:
        return {"model_path": str(self._folder), "weight_version": self._version}

    async def _update(self, request: Request) -> JSONResponse:
        body = await request.json()
        assert body.keys() <= UPDATE_FIELDS
        self.updates.append(body)
        await asyncio.sleep(self.update_seconds)
        is_late = self.refuses_after is not None and len(self.updates) > self.refuses_after
        if self.refuses_updates or is_late:
            content = {"success": False, "message": "no", "num_paused_requests": 0}
            return JSONResponse(content, status_code=400)
        if not self.ignores_updates:
            before = self._release_id
            self._folder = Path(body["model_path"])
            release = load_release(self._folder)
            await self._engine.stage(release, self._folder)
            await self._engine.commit(release.id)
            if before is not None and before != release.id:
                await self._engine.unload(before)
            self._release_id, self._version = release.id, body["weight_version"]
        return JSONResponse({"success": True, "message": "ok", "num_paused_requests": 0})

    async def _generate(self, request: Request) -> StreamingResponse:
        body = await request.json()
        assert body["stream"] and body["sampling_params"]["ignore_eos"]
        return StreamingResponse(self._chunks(body), media_type="text/event-stream")

    async def _chunks(self, body: dict[str, Any]) -> AsyncIterator[str]:
        generation = _generation(body)
        token_ids: list[int] = []
        logprobs: list[TokenLogprob] = []
        assert self._release_id is not None
        steps = self._engine.generate(self._release_id, generation)
        async with aclosing(steps):
            async for step in steps:
                if self.breaks_off and token_ids:
                    return
                token_ids += step.token_ids
                logprobs += step.logprobs
                yield f"data: {json.dumps(self._chunk(body, step, token_ids, logprobs))}\n\n"
                await asyncio.sleep(0)
        yield "data: [DONE]\n\n"

    def _chunk(
        self, body: dict[str, Any], step: Step, token_ids: list[int], logprobs: list[TokenLogprob]
    ) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "finish_reason": step.finish_reason and {"type": step.finish_reason},
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": len(token_ids),
            "cached_tokens": 0,
        }
        if self._version is not None:
            meta["weight_version"] = self._version
        if body["return_logprob"]:
            prompt = step.prompt_logprobs or ()
            meta |= {
                "output_token_logprobs": [[p.logprob, p.token_id, None] for p in logprobs],
                "output_top_logprobs": [[[v, t, None] for t, v in p.top] for p in logprobs],
                "input_token_logprobs": [
                    [None, body["input_ids"][0], None],
                    *([p.logprob, p.token_id, None] for p in prompt),
                ],
                "input_top_logprobs": [None, *([[v, t, None] for t, v in p.top] for p in prompt)],
            }
        new = list(step.token_ids) if self._streams_differences else token_ids
        return {"text": "", "output_ids": new, "meta_info": meta}


def _generation(body: dict[str, Any]) -> Generation:
    sampling = body["sampling_params"]
    wants = body["top_logprobs_num"] if body["return_logprob"] else None
    return Generation(
        prompt=tuple(body["input_ids"]),
        max_tokens=sampling["max_new_tokens"],
        min_tokens=sampling["min_new_tokens"],
        temperature=sampling["temperature"],
        seed=sampling["sampling_seed"],
        stop_token_ids=tuple(sampling["stop_token_ids"] or ()),
        num_logprobs=wants,
        num_prompt_logprobs=wants if body["logprob_start_len"] == 0 else None,
    )
