"""`VllmProcess`: one vLLM, from its start on a release until it dies or is ended."""

import asyncio
import logging
import os
import threading
import time
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing, suppress
from math import prod
from pathlib import Path
from typing import Any, Self, cast
from uuid import uuid4

import torch

from serving.engine import EngineError, Generation, GenerationRefused, StageError, Step
from serving.engines.torch_engine.device import free_bytes
from serving.engines.vllm_settings import VllmEngineSettings
from serving.errors import first_line
from serving.weights import network
from serving.weights.headers import DTYPE_BYTES
from serving.weights.release import Release, read_json

# vLLM reads these when it is imported. The first one allows a context that is one token longer than
# `config.json` says. We need this to score a text that fills the context, because vLLM always
# generates at least one token.
os.environ.setdefault("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

from vllm import AsyncEngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.inputs.engine import tokens_input
from vllm.platforms import current_platform
from vllm.tokenizers import get_tokenizer
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError
from vllm.v1.metrics.loggers import PrometheusStatLogger

from serving.engines.vllm_requests import sampling_params, step_of

_log = logging.getLogger(__name__)

_WORKER = "serving.engines.vllm_worker.HotpushWorker"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
_POLL_SECONDS = 0.02
# vLLM itself kills its processes after five seconds.
_END_SECONDS = 30.0
_CPU_KV_CACHE_BYTES = 2 << 30


class _KvCacheUsage(PrometheusStatLogger):  # type: ignore[misc]
    """Keeps what vLLM says about its KV cache after each step. Without a subclass of this type,
    vLLM would also keep all of its own metrics, which nobody reads."""

    def __init__(self, *arguments: object, **settings: object) -> None:
        self.share = 0.0

    def record(self, scheduler_stats: Any, *arguments: object, **settings: object) -> None:
        if scheduler_stats is not None:
            self.share = scheduler_stats.kv_cache_usage

    def log_engine_initialized(self) -> None:
        """Does nothing, because there is nothing to say at the start."""


class VllmProcess:
    """All methods must be called on one event loop. `release_id` names the current weights."""

    def __init__(self, llm: AsyncLLM, release: Release) -> None:
        self._llm = llm
        self._held = {release.id: release}
        self.release_id = release.id
        self._first_tokenizer = self._tokenizer_of(release.id)
        """The tokenizer files with which vLLM was started. vLLM keeps this tokenizer."""
        self.way = ""
        """How a commit replaces weights: `copy` or `reload`."""
        self.pids: tuple[int, ...] = ()
        """The process ids of the workers."""
        self.read_bytes: dict[str, int] = {}
        """Release id → bytes that were read to stage it."""
        self.pause_seconds: dict[str, float] = {}
        """Release id → seconds for which its last commit stopped the workers."""

    @classmethod
    async def start(cls, release: Release, folder: Path, settings: VllmEngineSettings) -> Self:
        """Start vLLM on this release, which may take minutes. Raises StageError if vLLM does not
        start. If the call is cancelled, vLLM is shut down when its start ends."""
        starting = asyncio.ensure_future(asyncio.to_thread(_start, folder, settings))
        try:
            llm = await asyncio.shield(starting)
        except asyncio.CancelledError:
            starting.add_done_callback(_end_late_start)
            raise
        # vLLM, torch and the operating system raise many kinds of errors here.
        except Exception as error:
            reason = first_line(error)
            raise StageError(f"vLLM does not start on {folder.name}: {reason}") from error
        process = cls(llm, release)
        try:
            await process._prepare(folder, settings)
        except BaseException:
            await process.end()
            raise
        return process

    @property
    def kv_cache_usage(self) -> float:
        loggers = self._llm.logger_manager.stat_loggers
        return next(each.share for each in loggers if isinstance(each, _KvCacheUsage))

    @property
    def is_dead(self) -> bool:
        return bool(self._llm.errored)

    async def take_turn(self) -> None:
        """Makes a call without effect, which each worker answers between two steps. Raises
        EngineError."""
        await self.call("hotpush_needed_bytes", {})

    def holds(self, release_id: str) -> bool:
        return release_id in self._held

    async def stage(self, release: Release, folder: Path) -> None:
        """Read the tensors that differ from the current weights into host memory. `reload` needs
        all tensors. Raises StageError and EngineError."""
        base = self._held[self.release_id]
        changed = {
            name: (entry.file, entry.digest)
            for name, entry in release.tensors.items()
            if self.way == "reload" or entry.digest != base.tensors[name].digest
        }
        await self._check_memory(release, changed)
        try:
            await self.call("hotpush_stage", release.id, base.id, str(folder), changed)
            while True:
                states = await self.call("hotpush_status", release.id)
                if all(state["is_done"] for state in states):
                    break
                await asyncio.sleep(_POLL_SECONDS)
        except asyncio.CancelledError:
            await asyncio.shield(self.call("hotpush_forget", release.id))
            raise
        refusals = {reason: None for state in states for reason in state["refusals"]}
        errors = {state["error"] for state in states} - {None}
        if refusals or errors:
            # The other workers may have staged the release. This is not done if a call fails: then
            # vLLM has died, holds nothing that could be freed, and may never answer.
            with suppress(EngineError):
                await self.call("hotpush_forget", release.id)
        if refusals:
            raise StageError(*refusals)
        if errors:
            raise EngineError(f"staging {release.id}: {'; '.join(sorted(errors))}")
        self._held[release.id] = release
        self.read_bytes[release.id] = max(state["read_bytes"] for state in states)
        _log.info(
            "staged %s in %.2f s: read %d bytes of %d tensors",
            release.id,
            max(state["seconds"] for state in states),
            self.read_bytes[release.id],
            len(changed),
        )

    async def commit(self, release_id: str) -> None:
        """Replace the weights. No request may run. After an error the weights may be a mixture of
        both releases, so end the process. Raises EngineError."""
        self.pause_seconds[release_id] = max(await self.call("hotpush_commit", release_id))
        await self._set_weight_version(release_id)
        self.release_id = release_id

    async def forget(self, release_id: str) -> None:
        if release_id != self.release_id and self._held.pop(release_id, None) is not None:
            await self.call("hotpush_forget", release_id)

    async def generate(self, generation: Generation) -> AsyncGenerator[Step, None]:
        """Raises EngineError, and GenerationRefused for a grammar that vLLM refuses."""
        release_id = self.release_id
        # With this salt, the prefix cache finds no keys and values that other weights computed.
        prompt = tokens_input(list(generation.prompt), cache_salt=release_id)
        parameters = sampling_params(generation, self._end_of_text)
        outputs = self._llm.generate(prompt, parameters, uuid4().hex)
        try:
            async with aclosing(cast(AsyncGenerator[Any, None], outputs)):
                async for output in outputs:
                    yield step_of(output, generation, release_id)
        except (EngineDeadError, EngineGenerateError) as error:
            raise EngineError(f"vLLM stopped: {first_line(error)}") from error
        except (ValueError, VLLMValidationError) as error:
            if generation.grammar is not None:
                param = generation.grammar.param
                raise GenerationRefused(first_line(error), param=param) from error
            raise EngineError(f"vLLM refuses the request: {first_line(error)}") from error

    @property
    def _end_of_text(self) -> int | None:
        """The token with which vLLM's tokenizer ends a text. None if vLLM's tokenizer is not that
        of the current release."""
        tokenizer = self._llm.tokenizer
        if tokenizer is None or self._tokenizer_of(self.release_id) != self._first_tokenizer:
            return None
        return cast("int | None", tokenizer.eos_token_id)

    def _tokenizer_of(self, release_id: str) -> dict[str, str]:
        files = self._held[release_id].files
        return {name: files[name].sha256 for name in _TOKENIZER_FILES if name in files}

    async def end(self) -> None:
        """Shut vLLM down. If it does not shut down in time, leave it behind and return, because the
        next vLLM may be waiting for its place."""
        # A daemon thread: if the shutdown hangs, it occupies no thread of the pool, and our server
        # can still exit.
        ending = threading.Thread(target=self._llm.shutdown, name="vllm-shutdown", daemon=True)
        ending.start()
        deadline = time.monotonic() + _END_SECONDS
        while ending.is_alive():
            if time.monotonic() > deadline:
                _log.error("vLLM did not shut down in %g s", _END_SECONDS)
                return
            await asyncio.sleep(_POLL_SECONDS)

    async def _prepare(self, folder: Path, settings: VllmEngineSettings) -> None:
        release = self._held[self.release_id]
        weight_map = {name: entry.file for name, entry in release.tensors.items()}
        workers = await self.call(
            "hotpush_prepare", release.id, str(folder), weight_map, settings.way, os.getpid()
        )
        ways = {worker["way"] for worker in workers}
        if len(ways) > 1:
            raise StageError(f"vLLM's workers do not agree: {workers}")
        (self.way,) = ways
        self.pids = tuple(worker["pid"] for worker in workers)
        if (reason := workers[0]["reason"]) is not None:
            _log.warning("swaps take vLLM's own, slower way: %s", reason)
        await self._set_weight_version(release.id)

    async def _check_memory(self, release: Release, changed: Iterable[str]) -> None:
        """Raises StageError if there is too little memory to stage the release, and EngineError."""
        entries = {name: release.tensors[name] for name in changed}
        stored = {
            name: prod(entry.shape) * DTYPE_BYTES[entry.dtype] for name, entry in entries.items()
        }
        # Only a worker knows how much memory the tensors take there. All workers share one memory.
        needed = sum(await self.call("hotpush_needed_bytes", stored))
        free = free_bytes(torch.device("cpu"))
        if free is not None and needed > free:
            raise StageError(
                f"too little memory: {release.id} needs {needed} bytes to be staged, "
                f"{free} are free"
            )

    async def _set_weight_version(self, release_id: str) -> None:
        """vLLM adds this version to each answer. It shows if other weights computed an answer."""
        try:
            await self._llm.update_weight_version(release_id)
        except EngineDeadError as error:
            raise EngineError(f"vLLM stopped: {first_line(error)}") from error

    async def call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method on each worker. Returns their results. Raises EngineError."""
        try:
            found: list[Any] = await self._llm.collective_rpc(method, args=arguments)
        except Exception as error:
            raise EngineError(f"{method}: {first_line(error)}") from error
        return found


def _start(folder: Path, settings: VllmEngineSettings) -> AsyncLLM:
    is_cpu = current_platform.is_cpu()
    context = read_json(folder / "config.json").get("max_position_embeddings")
    if context is None:
        context = network.context_length(network.load_config(folder))
    context = min(context, settings.max_context or context)
    kv_cache_bytes = settings.kv_cache_bytes
    if kv_cache_bytes is None and is_cpu:
        kv_cache_bytes = _CPU_KV_CACHE_BYTES
    arguments = AsyncEngineArgs(
        model=str(folder),
        # Look only for the formats and file names of a release.
        load_format="hf",
        generation_config="vllm",
        # The tokenizer is only needed for grammars.
        skip_tokenizer_init=not _has_tokenizer(folder),
        # The same library as in the torch engine. By default, the first request would choose the
        # library for all later ones.
        structured_outputs_config={"backend": "guidance"},
        dtype=settings.dtype,
        tensor_parallel_size=settings.tensor_parallel_size,
        max_model_len=context + 1,
        max_num_seqs=settings.max_sequences,
        max_logprobs=-1,
        gpu_memory_utilization=settings.memory_share,
        kv_cache_memory_bytes=kv_cache_bytes,
        enable_prefix_caching=True,
        enforce_eager=is_cpu if settings.compiles is None else not settings.compiles,
        worker_extension_cls=_WORKER,
        disable_log_stats=True,
    )
    return AsyncLLM.from_engine_args(arguments, stat_loggers=[_KvCacheUsage])


def _has_tokenizer(folder: Path) -> bool:
    """Whether vLLM can load the release's tokenizer. If it cannot, it would not start."""
    try:
        return get_tokenizer(str(folder)).eos_token_id is not None
    # `transformers` raises any kind of error for files that it cannot read.
    except Exception as error:
        reason = first_line(error)
        _log.warning("no grammars: vLLM cannot load the tokenizer of %s: %s", folder, reason)
        return False


def _end_late_start(starting: "asyncio.Future[AsyncLLM]") -> None:
    if not starting.cancelled() and starting.exception() is None:
        # On a thread, because this callback runs on the event loop.
        threading.Thread(
            target=starting.result().shutdown, name="vllm-shutdown", daemon=True
        ).start()
