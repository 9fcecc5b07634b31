"""`Engine`, the interface between the server and what computes tokens.

An engine holds releases under their ids, takes the token ids of a prompt, and generates token ids
with the release that the server names. The server itself handles tokenizers, stop strings,
admission and the order of a swap.
"""

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from tokenizers import Tokenizer

from serving.weights.release import Release

MIN_LOGPROB = -9999.0
"""The smallest logprob that an engine reports, as in vLLM. A token can have the probability 0, but
JSON cannot express its logprob, which is minus infinity."""


def reported_logprob(logprob: float) -> float:
    """`logprob`, or `MIN_LOGPROB` if it is smaller or not a number. A network computes NaN if its
    numbers overflow."""
    return logprob if logprob >= MIN_LOGPROB else MIN_LOGPROB


GrammarKind = Literal["json_schema", "regex", "choice", "grammar"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Grammar:
    """A form that the text of a sequence must have."""

    kind: GrammarKind
    text: str
    """Depends on `kind`. `json_schema`: the schema as JSON. `regex`: the regular expression.
    `choice`: a JSON list of the strings to choose from. `grammar`: an EBNF grammar in the notation
    of GBNF, or of Lark with a first line `%llguidance {}`."""
    param: str
    """The field of the request that asks for this form. Errors name this field."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """One sequence to generate. The server checks the ranges of the values before it gives them to
    an engine."""

    prompt: tuple[int, ...]
    """The token ids of the prompt, at least one."""
    max_tokens: int
    """The largest number of new tokens. With 0, the engine computes the logprobs of the prompt and
    generates nothing."""
    min_tokens: int = 0
    temperature: float = 1.0
    """0 always chooses the most probable token."""
    top_p: float = 1.0
    top_k: int = 0
    """0 means no limit."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    """The token ids that end the sequence. They include the end-of-sequence tokens, unless the
    request has `ignore_eos`."""
    allowed_token_ids: tuple[int, ...] | None = None
    """The only token ids that may be generated; None allows all."""
    grammar: Grammar | None = None
    """If this is set, a stop token is generated only where the text may end. Where the text is
    complete and nothing can follow, the sequence ends with `stop`, even without a stop token."""
    tokenizer: Tokenizer | None = None
    """The tokenizer of the release, for which the grammar is compiled. Set if `grammar` is set."""
    num_logprobs: int | None = None
    """How many of the most probable tokens to report for each new token. With 0, only the logprob
    of the new token itself is reported; with None, no logprobs at all."""
    num_prompt_logprobs: int | None = None
    """The same as `num_logprobs`, for each token of the prompt except the first one."""
    max_step_tokens: int = 1
    """The largest number of new tokens in one `Step`. This is more than 1 if nobody reads the
    tokens one by one, because each step costs the event loop as much time as several tokens do. The
    engine hands the first token over at once, and may always hand over fewer tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLogprob:
    """The logprob of one token, given the tokens before it."""

    token_id: int
    logprob: float
    """The natural logarithm of the token's probability in the model's own distribution:
    temperature 1, before penalties. At least `MIN_LOGPROB`."""
    top: tuple[tuple[int, float], ...] = ()
    """The most probable tokens at this place, as (token id, logprob). The most probable one comes
    first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Waits:
    """What a sequence waited for before its first token."""

    queue_seconds: float
    """Until the engine began to compute its prompt."""
    prefill_seconds: float
    """From then until its first token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """What the engine has added to a sequence since the last step."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    """One entry for each of `token_ids`; empty if the generation asks for no logprobs."""
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    """One entry for each token of the prompt except the first one. Set only in the first step, and
    only if the generation asks for it."""
    finish_reason: str | None = None
    """`stop` or `length` in the last step, otherwise None."""
    num_cached_tokens: int = 0
    """How many tokens of the prompt the engine found in its cache. Set in the first step; in later
    ones it may be 0."""
    waits: Waits | None = None
    """Set in the first step, if the engine measures it."""
    num_preemptions: int = 0
    """How often the sequence was preempted (lost its memory in the engine) since the last step."""


class EngineError(Exception):
    """The engine failed. A request that needs the engine gets 503."""


class GenerationRefused(EngineError):
    """The engine cannot generate what the request asks for, and would refuse the same request
    again. The request gets 400."""

    def __init__(self, reason: str, *, param: str) -> None:
        super().__init__(reason)
        self.param = param
        """The field of the request that causes the error."""


class Engine(Protocol):
    """Computes the tokens of a server. The server calls all methods but `dtype_of` on one event
    loop."""

    holds_two: bool
    """Whether the engine can generate with two releases at the same time. If not, `commit` replaces
    the weights of the live release, so the server first waits until running requests have ended."""

    @property
    def kv_cache_usage(self) -> float:
        """The share of the KV cache that running sequences use, from 0 to 1."""

    @property
    def failure(self) -> str | None:
        """Why the engine cannot compute now; None if it can."""

    async def take_turn(self) -> None:
        """Return when it is certain that the engine does not hang: its thread or process has
        handled this call, or is seen to make progress. If the engine hangs, this never returns.

        Raises EngineError if the engine will compute nothing until the server is started again.
        """

    async def stage(self, release: Release, folder: Path) -> None:
        """Load `release` from `folder`, while the live release stays loaded and its running
        requests continue without a delay. Each tensor that is read is checked against its digest in
        the manifest.

        Raises ReleaseError if `release` cannot be loaded, and EngineError if the engine has
        failed. The engine has then freed all memory that it took for `release`.
        """

    def dtype_of(self, release: Release) -> str:
        """The dtype in which the engine computes with `release`: `float32`, `bfloat16` or
        `float16`. A swap checks the release's probe against the bound for this dtype."""

    def max_context(self, release_id: str) -> int | None:
        """The largest number of tokens in a sequence of a staged release, including the prompt.
        None if the engine allows every length that the release allows."""

    async def commit(self, release_id: str) -> None:
        """Let generations use this release from now on; some engines let them from `stage` on. The
        release is staged, or it was committed before and is not unloaded (a swap failed, and the
        old release must be used again).

        `stage` must already have found every error that it can find. This call is fast.

        If `holds_two` is true, generations may also use the release that was committed before,
        until it is unloaded. New requests get that release until the new one has passed its probe,
        and running requests end on it.
        """

    async def unload(self, release_id: str) -> None:
        """Free a staged or committed release as soon as its last generation has ended. Returns
        without waiting for that."""

    def generate(self, release_id: str, generation: Generation) -> AsyncGenerator[Step, None]:
        """The steps of one sequence. To end the sequence and free its slot, close the iterator.

        Raises EngineError. Raises GenerationRefused before the first step, or later if a grammar
        turns out to be too complex.
        """

    async def close(self) -> None:
        """End all generations and free all memory and processes."""
