"""`Engine`: the seam between the server and whatever computes tokens. Tokens in, tokens out.

Tokenizers, stop strings, admission and the order of a swap are the server's. An engine holds
releases, by id, and generates under the one that a request names.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from serving.weights.release import Release


@dataclass(frozen=True, kw_only=True, slots=True)
class Grammar:
    """What the text of a sequence has to be."""

    kind: Literal["json_schema", "json_object", "regex", "choice", "grammar"]
    text: str
    """The schema as JSON; nothing for `json_object`; the regular expression; a JSON list of the
    strings to choose from; or a grammar, as EBNF in GBNF's notation or in Lark's."""
    param: str
    """The field of the request that asks for it, which errors name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """One sequence to generate. Ranges are checked by the server before an engine sees them."""

    prompt: tuple[int, ...]
    """Token ids, at least one."""
    max_tokens: int
    """New tokens at most; 0 scores the prompt and generates nothing."""
    min_tokens: int = 0
    temperature: float = 1.0
    """0 takes the most probable token."""
    top_p: float = 1.0
    top_k: int = 0
    """0 for no limit."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    """End-of-sequence ids too; a request that ignores them leaves them out."""
    allowed_token_ids: tuple[int, ...] | None = None
    """No other token is generated; None for all."""
    grammar: Grammar | None = None
    """A stop token is generated only where the text may end; where it can only end, the sequence
    does, with `stop`, whether a stop token was generated or not."""
    num_logprobs: int | None = None
    """Alternatives reported beside each new token; None for no logprobs at all."""
    num_prompt_logprobs: int | None = None
    """The same for each token of the prompt after the first."""
    max_step_tokens: int = 1
    """New tokens of one step at most, the first apart, which comes at once. More than 1 where they
    are not read one by one: a step costs the event loop as much as several tokens do. An engine may
    always hand over fewer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLogprob:
    token_id: int
    logprob: float
    """Natural log, of the model's own distribution (temperature 1, before penalties)."""
    top: tuple[tuple[int, float], ...] = ()
    """The most probable tokens there, best first, as (token id, logprob)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """What one step of the engine added to a sequence."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    """One for each of `token_ids`, where asked for."""
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    """On the first step, where asked for: one fewer than prompt tokens."""
    finish_reason: str | None = None
    """`stop` or `length` on the last step, else None."""
    num_cached_tokens: int = 0


class StageError(Exception):
    """A release could not be loaded; the reasons are for the person who asked for the swap."""

    def __init__(self, *reasons: str) -> None:
        super().__init__("; ".join(reasons))
        self.reasons = reasons


class EngineError(Exception):
    """The engine died under a request: the server answers 503."""


class GenerationRefused(EngineError):
    """This engine cannot generate what is asked for, and never will: the server answers 400."""

    def __init__(self, reason: str, *, param: str) -> None:
        super().__init__(reason)
        self.param = param
        """The field of the request that is at fault."""


def refuse_constraints(generation: Generation, engine: str) -> None:
    """Raises GenerationRefused for what not every engine can do."""
    param = "allowed_token_ids" if generation.allowed_token_ids is not None else None
    if generation.grammar is not None:
        param = generation.grammar.param
    if param is not None:
        raise GenerationRefused(f"not supported by the engine {engine}; leave it out", param=param)


class Engine(Protocol):
    holds_two: bool
    """Whether two releases can generate side by side. Where they cannot, `commit` replaces the live
    one's weights, and the server drains its requests first."""
    checks_digests: bool
    """Whether `stage` proves every tensor that it reads by its digest in the manifest. Where it
    does not, the server reads all shards first, to prove them."""
    commit_seconds: float | None
    """Longest time for a commit, either way; None for what the server allows behind its barrier."""

    @property
    def failure(self) -> str | None:
        """Why it computes nothing now; None where it can compute."""

    async def take_turn(self) -> None:
        """Return once what computes has come by, or is seen to compute: the proof that it does not
        hang. An engine that hangs never returns.

        Raises EngineError if nothing will be computed until the server is started again.
        """

    async def stage(self, release: Release, folder: Path) -> None:
        """Load `release` from `folder` beside what is live, without delaying running requests.

        Raises StageError, having freed what it took.
        """

    def dtype_of(self, release: Release) -> str:
        """The type of number that the engine computes `release` in: `float32`, `bfloat16` or
        `float16`. A swap checks the release's probe by the bound for this type."""

    def max_context(self, release_id: str) -> int | None:
        """Tokens of a sequence at most, prompt included, of a staged release; None for all that
        the release allows."""

    async def commit(self, release_id: str) -> None:
        """Make a release the one that new generations may name: a staged one, or one that was live
        before and is not unloaded (the way back). Fast, and nothing in it can fail for a reason
        that `stage` could have found.

        Where `holds_two`, generations may name the release before, too, until it is unloaded:
        requests enter on it until the new one is proved, and those that did go on.
        """

    async def unload(self, release_id: str) -> None:
        """Free a release, staged or committed, once its last generation ended. Returns at once."""

    def generate(self, release_id: str, generation: Generation) -> AsyncIterator[Step]:
        """Steps of one sequence; closing the iterator frees its slot. Raises EngineError, and
        GenerationRefused before the first step, or when a grammar turns out to be too complex."""

    async def close(self) -> None:
        """End every generation and free everything."""
