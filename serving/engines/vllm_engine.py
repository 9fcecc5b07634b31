"""`VllmEngine`: runs one vLLM, which computes in processes of its own. A swap replaces its weights
while no request runs.

If vLLM dies or a commit fails, the engine has failed: it computes nothing until the server is
started again, which `pipeline up` does.
"""

import asyncio
import json
import logging
import os
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

import torch

from serving.engine import (
    EngineError,
    Generation,
    GenerationRefused,
    Grammar,
    Step,
    TokenLogprob,
    reported_logprob,
)
from serving.engines.same_network import config_differences, tensor_differences
from serving.engines.settings import VllmEngineSettings
from serving.errors import ReleaseError, first_line
from serving.weights import network
from serving.weights.release import Dtype, Release, choose_dtype
from serving.weights.shards import not_finite
from serving.weights.verify import verify_shards

# vLLM reads these when it is imported. The first one allows a context that is one token longer than
# `config.json` says. We need this to score a text that fills the context, because vLLM always
# generates at least one token.
os.environ.setdefault("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

from vllm import AsyncEngineArgs, SamplingParams
from vllm.exceptions import VLLMClientError
from vllm.inputs.engine import tokens_input
from vllm.outputs import RequestOutput
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError
from vllm.v1.metrics.loggers import PrometheusStatLogger

_log = logging.getLogger(__name__)

_WORKER = "serving.engines.vllm_worker.HotpushWorker"
_TOKENIZER = "tokenizer.json"
_POLL_SECONDS = 0.02
# vLLM itself kills its processes after five seconds.
_END_SECONDS = 30.0
_CPU_KV_CACHE_BYTES = 2 << 30


class VllmEngine:
    """Call all methods but `dtype_of` on one event loop. The first staged release starts vLLM."""

    holds_two = False

    def __init__(self, settings: VllmEngineSettings) -> None:
        self._settings = settings
        self._llm: AsyncLLM | None = None
        self._held: dict[str, tuple[Release, Path]] = {}
        """The staged releases, and the one with which vLLM computes."""
        self._live: str | None = None
        """The release with which vLLM computes."""
        self._changing = asyncio.Lock()
        self._fault: str | None = None
        self.way = ""
        """How a commit replaces weights: `copy`, or `reload` if a worker cannot copy."""
        self.pids: tuple[int, ...] = ()
        """The process ids of the workers."""
        self.read_bytes: dict[str, int] = {}
        """Release id → bytes that were read to stage it."""

    @property
    def kv_cache_usage(self) -> float:
        if self._llm is None:
            return 0.0
        loggers = self._llm.logger_manager.stat_loggers
        return next(each.share for each in loggers if isinstance(each, _KvCacheUsage))

    @property
    def failure(self) -> str | None:
        return "vLLM died" if self._llm is not None and self._llm.errored else self._fault

    async def take_turn(self) -> None:
        """Waits only if vLLM runs and no swap is in progress, because starts and swaps have their
        own time limits. Otherwise each worker answers between two steps."""
        if self.failure is not None:
            raise EngineError(self.failure)
        if self._llm is not None and not self._changing.locked():
            await self._call("hotpush_take_turn")

    async def stage(self, release: Release, folder: Path) -> None:
        """Starts vLLM if this is the first release. Raises ReleaseError and EngineError."""
        async with self._changing:
            if self.failure is not None:
                raise EngineError(self.failure)
            if self._llm is None:
                await self._start(release, folder)
            elif release.id not in self._held:
                await self._stage(release, folder)
            self._held[release.id] = release, folder

    def dtype_of(self, release: Release) -> Dtype:
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
        return choose_dtype(self._settings.dtype, device_type, release)

    def max_context(self, release_id: str) -> int | None:
        return self._settings.max_context

    async def commit(self, release_id: str) -> None:
        """Raises EngineError."""
        async with self._changing:
            if self.failure is not None or release_id not in self._held:
                raise EngineError(self.failure or f"{release_id} is not staged")
            if release_id == self._live:
                return
            try:
                pauses = await self._call("hotpush_commit", release_id)
                await self._set_weight_version(release_id)
            except BaseException:
                self._fault = f"the change to {release_id} failed, so vLLM's weights may be mixed"
                raise
            self._live = release_id
            _log.info("vLLM stood still for %.4f s to use %s", max(pauses), release_id)

    async def unload(self, release_id: str) -> None:
        """Shuts vLLM down if it computes with this release."""
        if self._held.pop(release_id, None) is None:
            return
        if release_id == self._live:
            self._fault = self.failure  # a vLLM that has died is not started again
            await self.close()
        else:
            with suppress(EngineError):  # a dead vLLM holds nothing that could be freed
                await self._call("hotpush_forget", release_id)

    async def generate(self, release_id: str, generation: Generation) -> AsyncGenerator[Step, None]:
        """Raises EngineError, and GenerationRefused for a grammar that vLLM refuses."""
        if self._llm is None or self.failure is not None or release_id != self._live:
            raise EngineError(self.failure or f"vLLM computes with {self._live}")
        # With this salt, the prefix cache finds no keys and values that other weights computed.
        prompt = tokens_input(list(generation.prompt), cache_salt=release_id)
        tokenizer = self._llm.tokenizer
        end_of_text = None if tokenizer is None else tokenizer.eos_token_id
        try:
            parameters = _sampling_params(generation, end_of_text)
            outputs = self._llm.generate(prompt, parameters, uuid4().hex)
            async with aclosing(cast(AsyncGenerator[Any, None], outputs)):
                async for output in outputs:
                    yield _step_of(output, generation, release_id)
        except (EngineDeadError, EngineGenerateError) as error:
            raise EngineError(f"vLLM stopped: {first_line(error)}") from error
        except VLLMClientError as error:
            if generation.grammar is not None:
                param = generation.grammar.param
                raise GenerationRefused(first_line(error), param=param) from error
            raise EngineError(f"vLLM refuses the request: {first_line(error)}") from error

    async def close(self) -> None:
        llm, self._llm, self._live = self._llm, None, None
        self._held.clear()
        if llm is not None:
            await _shut_down(llm)

    async def _start(self, release: Release, folder: Path) -> None:
        """Start vLLM on this release, which may take minutes. Raises ReleaseError, EngineError."""
        settings = self._settings.model_copy(update={"dtype": self.dtype_of(release)})
        try:
            # vLLM does not check what it reads.
            if reasons := await asyncio.to_thread(_faults, release, folder):
                raise ReleaseError(*reasons)
            self._llm = await _started(folder, settings)
            await self._prepare(release, folder)
        except BaseException:
            await self.close()
            raise
        # vLLM keeps its dtype while it runs.
        self._settings, self._live = settings, release.id

    async def _prepare(self, release: Release, folder: Path) -> None:
        arguments = (release.id, str(folder), _stored(release), self._settings.way, os.getpid())
        workers = await self._call("hotpush_prepare", *arguments)
        self.pids = tuple(worker["pid"] for worker in workers)
        reasons = {worker["reason"] for worker in workers} - {None}
        self.way = "reload" if reasons else "copy"
        if reasons:
            _log.warning("swaps take vLLM's own, slower way: %s", "; ".join(reasons))
        await self._set_weight_version(release.id)

    async def _stage(self, release: Release, folder: Path) -> None:
        """Read the tensors that differ from the current weights into host memory."""
        assert self._live is not None
        base, base_folder = self._held[self._live]
        if reasons := _differences(base, base_folder, release, folder):
            raise ReleaseError(*reasons, "start the server again to serve another network")
        try:
            await self._call("hotpush_stage", release.id, str(folder), _stored(release))
            while None in (states := await self._call("hotpush_status")):
                await asyncio.sleep(_POLL_SECONDS)
            if reasons := [reason for state in states for reason in state["reasons"]]:
                raise ReleaseError(*dict.fromkeys(reasons))
        except BaseException:
            # Not if vLLM has died: it holds nothing that could be freed, and may never answer.
            if self.failure is None:
                await asyncio.shield(self._call("hotpush_forget", release.id))
            raise
        self.read_bytes[release.id] = max(state["read_bytes"] for state in states)

    async def _set_weight_version(self, release_id: str) -> None:
        """vLLM adds this version to each answer. It shows if other weights computed an answer."""
        assert self._llm is not None
        try:
            await self._llm.update_weight_version(release_id)
        except EngineDeadError as error:
            raise EngineError(f"vLLM stopped: {first_line(error)}") from error

    async def _call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method on each worker. Returns their results. Raises EngineError."""
        if self._llm is None:
            raise EngineError("vLLM does not run")
        try:
            found: list[Any] = await self._llm.collective_rpc(method, args=arguments)
        except Exception as error:
            raise EngineError(f"{method}: {first_line(error)}") from error
        return found


def create_engine(**settings: Any) -> VllmEngine:
    """An engine that holds no release yet. `VllmEngineSettings` explains the arguments. Raises
    ValidationError for an invalid setting."""
    return VllmEngine(VllmEngineSettings(**settings))


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


def _faults(release: Release, folder: Path) -> tuple[str, ...]:
    return verify_shards(folder, release) or tuple(not_finite(release, folder))


def _stored(release: Release) -> dict[str, tuple[str, str]]:
    return {name: (entry.file, entry.digest) for name, entry in release.tensors.items()}


def _differences(base: Release, base_folder: Path, release: Release, folder: Path) -> list[str]:
    """What vLLM cannot change while it runs."""
    reasons = config_differences(base_folder, folder) + tensor_differences(base, release)
    if base.files.get(_TOKENIZER) != release.files.get(_TOKENIZER):
        reasons.append(f"{_TOKENIZER}: differs from the one with which vLLM was started")
    return reasons


async def _started(folder: Path, settings: VllmEngineSettings) -> AsyncLLM:
    """Raises ReleaseError. If the call is cancelled, vLLM is shut down when its start ends."""
    starting = asyncio.ensure_future(asyncio.to_thread(_new_llm, folder, settings))
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        starting.add_done_callback(_shut_down_late)
        raise
    # vLLM, torch and the operating system raise many kinds of errors here.
    except Exception as error:
        reason = first_line(error)
        message = f"vLLM does not start on {folder.name}: {reason}; the server's log has more"
        raise ReleaseError(message) from error


def _shut_down_late(starting: "asyncio.Future[AsyncLLM]") -> None:
    if not starting.cancelled() and starting.exception() is None:
        asyncio.get_running_loop().run_in_executor(None, starting.result().shutdown)


async def _shut_down(llm: AsyncLLM) -> None:
    try:
        await asyncio.wait_for(asyncio.to_thread(llm.shutdown), _END_SECONDS)
    except TimeoutError:
        _log.error("vLLM did not shut down in %g s", _END_SECONDS)


def _new_llm(folder: Path, settings: VllmEngineSettings) -> AsyncLLM:
    is_cpu = current_platform.is_cpu()
    context = network.context_length(network.load_config(folder))
    kv_cache_bytes = settings.kv_cache_bytes or (_CPU_KV_CACHE_BYTES if is_cpu else None)
    arguments = AsyncEngineArgs(
        model=str(folder),
        # Look only for the formats and file names of a release.
        load_format="hf",
        generation_config="vllm",
        # The tokenizer is only needed for grammars.
        skip_tokenizer_init=not (folder / _TOKENIZER).is_file(),
        # The same library as in the torch engine. By default, the first request would choose the
        # library for all later ones.
        structured_outputs_config={"backend": "guidance"},
        dtype=settings.dtype,
        tensor_parallel_size=settings.tensor_parallel_size,
        max_model_len=min(context, settings.max_context or context) + 1,
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


def _sampling_params(generation: Generation, end_of_text: int | None) -> SamplingParams:
    """`end_of_text` is the token that vLLM generates when a grammar ends the text.

    Raises GenerationRefused if the generation has a grammar and `end_of_text` is None.
    """
    stops = list(generation.stop_token_ids)
    if generation.grammar is not None:
        if end_of_text is None:
            raise GenerationRefused(
                "the release has no tokenizer.json with an end-of-sequence token",
                param=generation.grammar.param,
            )
        stops.append(end_of_text)
    allowed = generation.allowed_token_ids
    return SamplingParams(
        # vLLM generates at least one token. If only the prompt is scored, this token is dropped.
        max_tokens=max(generation.max_tokens, 1),
        min_tokens=generation.min_tokens,
        temperature=generation.temperature,
        top_p=generation.top_p,
        top_k=generation.top_k,
        min_p=generation.min_p,
        presence_penalty=generation.presence_penalty,
        frequency_penalty=generation.frequency_penalty,
        repetition_penalty=generation.repetition_penalty,
        logit_bias=dict(generation.logit_bias) or None,
        # For vLLM, -1 means that there is no seed.
        seed=-(2**63) if generation.seed == -1 else generation.seed,
        stop_token_ids=stops,
        allowed_token_ids=None if allowed is None else list(allowed),
        structured_outputs=_structured_outputs(generation.grammar),
        # `stop_token_ids` has the end-of-sequence ids, unless the request ignores them.
        ignore_eos=True,
        logprobs=generation.num_logprobs,
        prompt_logprobs=generation.num_prompt_logprobs,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


def _structured_outputs(grammar: Grammar | None) -> StructuredOutputsParams | None:
    if grammar is None:
        return None
    if grammar.kind == "choice":
        return StructuredOutputsParams(choice=json.loads(grammar.text))
    field = "json" if grammar.kind == "json_schema" else grammar.kind
    return StructuredOutputsParams(**{field: grammar.text})


def _step_of(output: RequestOutput, generation: Generation, release_id: str) -> Step:
    """Raises EngineError if vLLM ended the sequence for another reason than `stop` or `length`, or
    if weights of another release computed a token. Raises GenerationRefused if vLLM cannot compile
    the grammar."""
    (completion,) = output.outputs
    if completion.finish_reason == "error" and generation.grammar is not None:
        raise GenerationRefused("vLLM cannot compile this grammar", param=generation.grammar.param)
    if completion.finish_reason not in (None, "stop", "length"):
        raise EngineError(f"vLLM ended the sequence: {completion.finish_reason}")
    strange = {span.version for span in completion.weight_versions or ()} - {release_id}
    if strange:
        raise EngineError(f"tokens of {', '.join(sorted(strange))} in an answer of {release_id}")
    prompt_logprobs = None
    if (num_top := generation.num_prompt_logprobs) is not None and output.prompt_logprobs:
        found = zip(generation.prompt[1:], output.prompt_logprobs[1:], strict=True)
        prompt_logprobs = tuple(
            _logprob(token_id, each, num_top) for token_id, each in found if each is not None
        )
    if generation.max_tokens == 0:
        return Step(prompt_logprobs=prompt_logprobs, finish_reason="length")
    token_ids = tuple(completion.token_ids)
    logprobs: tuple[TokenLogprob, ...] = ()
    if (num_top := generation.num_logprobs) is not None and completion.logprobs is not None:
        pairs = zip(token_ids, completion.logprobs, strict=True)
        logprobs = tuple(_logprob(token_id, each, num_top) for token_id, each in pairs)
    return Step(
        token_ids=token_ids,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        finish_reason=completion.finish_reason,
        num_cached_tokens=output.num_cached_tokens or 0,
    )


def _logprob(token_id: int, found: Mapping[int, Any], num_top: int) -> TokenLogprob:
    """`found` has the most probable tokens, and always `token_id`."""
    # vLLM computes logprobs after it has applied the grammar, so those of tokens that the grammar
    # forbids are minus infinity.
    best = sorted(found.items(), key=lambda item: -item[1].logprob)[:num_top]
    return TokenLogprob(
        token_id=token_id,
        logprob=reported_logprob(found[token_id].logprob),
        top=tuple((other, reported_logprob(each.logprob)) for other, each in best),
    )
