"""`EchoEngine`: an engine without weights, for tests of clients, jobs and swaps. Its answers are
meaningless.

Tokens and logprobs are computed from the digest of the release's weights and the previous tokens.
So equal releases give equal answers, and different releases give different ones. Sampling uses the
seed; penalties and biases are ignored. Tests can make the engine fail or hang. They can also make
it keep the old head after a swap, as engines do that do not reload a tied head.

    engine = EchoEngine()
    engine.fail["commit"] = EngineError("out of order")
    app = create_app(engine=engine, ...)
"""

import asyncio
import hashlib
import math
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from serving.engine import EngineError, Generation, GenerationRefused, Step, TokenLogprob
from serving.errors import ReleaseError
from serving.weights.release import Release, read_json
from serving.weights.verify import verify_shards

EnginePhase = Literal["stage", "commit", "unload", "generate", "step", "turn"]


@dataclass(frozen=True, kw_only=True)
class _Resident:
    key: bytes
    """The digest of the weights only. It does not depend on how they are divided into shards."""
    vocab_size: int


class EchoEngine:
    kv_cache_usage = 0.0

    def __init__(self, *, holds_two: bool = True, step_seconds: float = 0.0) -> None:
        self.holds_two = holds_two
        self.step_seconds = step_seconds
        self.fail: dict[EnginePhase, Exception] = {}
        """Phase → the error that it raises, until the entry is removed."""
        self.hang: dict[EnginePhase, asyncio.Event] = {}
        """Phase → the event that it waits for."""
        self.context: int | None = None
        """The largest number of tokens in a sequence. None: the limit of the release."""
        self.keeps_old_head = False
        """Whether releases that are staged from now on answer with the weights of the live one."""
        self.num_running: Counter[str] = Counter()
        """Release id → number of running generations."""
        self.log: list[tuple[str, str]] = []
        """(`stage`, `commit` or `unload`, release id), in the order of the calls."""
        self._residents: dict[str, _Resident] = {}
        self._committed: set[str] = set()
        self._unloading: set[str] = set()
        self._live: str | None = None

    @property
    def failure(self) -> str | None:
        return str(self.fail["turn"]) if "turn" in self.fail else None

    async def take_turn(self) -> None:
        await self._inject_fault("turn")

    @property
    def resident(self) -> set[str]:
        """The ids of all releases in memory."""
        return set(self._residents)

    async def stage(self, release: Release, folder: Path) -> None:
        self.log.append(("stage", release.id))
        await self._inject_fault("stage")
        limit = 2
        if len(self._residents) >= limit:
            raise EngineError(f"asked to hold a third release beside {sorted(self._residents)}")
        if faults := verify_shards(folder, release):
            raise ReleaseError(*faults)
        key = weights_key(digests_of(release))
        if self.keeps_old_head and self._live is not None:
            key = self._residents[self._live].key
        vocab_size = read_json(folder / "config.json")["vocab_size"]
        self._residents[release.id] = _Resident(key=key, vocab_size=vocab_size)

    def dtype_of(self, release: Release) -> str:
        return "float32"

    def max_context(self, release_id: str) -> int | None:
        return self.context

    async def commit(self, release_id: str) -> None:
        self.log.append(("commit", release_id))
        await self._inject_fault("commit")
        if release_id not in self._residents:
            raise EngineError(f"{release_id} is not staged")
        others = [
            each for each, number in self.num_running.items() if number and each != release_id
        ]
        if not self.holds_two and others:
            raise EngineError(f"{others} were generating while their weights were replaced")
        self._live = release_id
        self._committed.add(release_id)

    async def unload(self, release_id: str) -> None:
        self.log.append(("unload", release_id))
        await self._inject_fault("unload")
        self._unloading.add(release_id)
        self._free_ended(release_id)

    async def generate(self, release_id: str, generation: Generation) -> AsyncGenerator[Step, None]:
        _refuse_constraints(generation)
        resident = self._residents.get(release_id)
        is_nameable = release_id in self._committed if self.holds_two else release_id == self._live
        if resident is None or not is_nameable:
            raise EngineError(f"{release_id} is not loaded and committed")
        self.num_running[release_id] += 1
        try:
            await self._inject_fault("generate")
            async for step in self._steps(resident, generation):
                yield step
        finally:
            self.num_running[release_id] -= 1
            self._free_ended(release_id)

    async def close(self) -> None:
        self._residents.clear()

    async def _steps(
        self, resident: _Resident, generation: Generation
    ) -> AsyncGenerator[Step, None]:
        tokens = list(generation.prompt)
        scored: tuple[TokenLogprob, ...] | None = None
        if generation.num_prompt_logprobs is not None:
            scored = tuple(
                _logprob(resident, tokens[:place], tokens[place], generation.num_prompt_logprobs)
                for place in range(1, len(tokens))
            )
        if generation.max_tokens == 0:
            yield Step(prompt_logprobs=scored, finish_reason="length")
            return
        salt = b"" if generation.temperature == 0 else repr(generation.seed).encode()
        for number in range(1, generation.max_tokens + 1):
            await self._inject_fault("step")
            await asyncio.sleep(self.step_seconds)
            ended = generation.stop_token_ids if number < generation.min_tokens else ()
            token_id = _next_token(resident, tokens, salt, excluded=ended)
            logprobs: tuple[TokenLogprob, ...] = ()
            if generation.num_logprobs is not None:
                logprobs = (_logprob(resident, tokens, token_id, generation.num_logprobs),)
            tokens.append(token_id)
            reason = None
            if token_id in generation.stop_token_ids:
                reason = "stop"
            elif number == generation.max_tokens:
                reason = "length"
            yield Step(
                token_ids=(token_id,),
                logprobs=logprobs,
                prompt_logprobs=scored if number == 1 else None,
                finish_reason=reason,
            )
            if reason:
                return

    def _free_ended(self, release_id: str) -> None:
        if release_id in self._unloading and not self.num_running[release_id]:
            self._unloading.discard(release_id)
            self._committed.discard(release_id)
            self._residents.pop(release_id, None)

    async def _inject_fault(self, phase: EnginePhase) -> None:
        if phase in self.hang:
            await self.hang[phase].wait()
        if phase in self.fail:
            raise self.fail[phase]


def digests_of(release: Release) -> dict[str, str]:
    return {name: entry.digest for name, entry in release.tensors.items()}


def _refuse_constraints(generation: Generation) -> None:
    param = "allowed_token_ids" if generation.allowed_token_ids is not None else None
    if generation.grammar is not None:
        param = generation.grammar.param
    if param is not None:
        raise GenerationRefused("not supported by the engine echo; leave it out", param=param)


def weights_key(digests: Mapping[str, str]) -> bytes:
    """One digest of those of all tensors. It does not depend on how they are divided into
    shards."""
    whole = hashlib.sha256()
    for name, digest in sorted(digests.items()):
        whole.update(f"{name}\0{digest}\n".encode())
    return whole.digest()


def echo_logprobs(digests: Mapping[str, str], token_ids: Sequence[int]) -> tuple[float, ...]:
    """The logprobs that a probe of these tokens measures under a release of these tensors. There is
    one fewer than there are tokens."""
    resident = _Resident(key=weights_key(digests), vocab_size=1)
    return tuple(
        _logprob(resident, token_ids[:place], token_ids[place], 0).logprob
        for place in range(1, len(token_ids))
    )


def _number(resident: _Resident, before: Sequence[int], extra: bytes) -> int:
    # Only the last 8 tokens, so that each step takes the same time.
    text = ",".join(map(str, before[-8:])).encode()
    digest = hashlib.blake2b(text + b"|" + extra, key=resident.key, digest_size=8)
    return int.from_bytes(digest.digest(), "little")


def _next_token(
    resident: _Resident, before: Sequence[int], salt: bytes, *, excluded: Sequence[int]
) -> int:
    token_id = _number(resident, before, b"next" + salt) % resident.vocab_size
    while token_id in excluded:
        token_id = (token_id + 1) % resident.vocab_size
    return token_id


def _logprob(
    resident: _Resident, before: Sequence[int], token_id: int, num_top: int
) -> TokenLogprob:
    def at(token: int) -> float:
        return -math.log1p(_number(resident, before, b"logprob%d" % token) % 10_000 / 100)

    candidates = range(token_id, token_id + num_top)
    top = [(token % resident.vocab_size, at(token % resident.vocab_size)) for token in candidates]
    return TokenLogprob(
        token_id=token_id,
        logprob=at(token_id),
        top=tuple(sorted(top, key=lambda pair: -pair[1])),
    )
