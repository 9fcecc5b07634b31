"""One generated sequence as text: detokenised, cut at stop strings, with its logprobs."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from serving.admission import LiveRelease
from serving.engine import Engine, Generation, Step, TokenLogprob
from serving.stop_strings import StopStrings
from serving.tokenizer import Detokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenText:
    """A token with its place in the text that was generated."""

    token_id: int
    offset: int
    """Characters of generated text before it."""
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Delta:
    """What is certain after a step; concatenated over all steps, the whole sequence."""

    text: str = ""
    tokens: tuple[TokenText, ...] = ()
    """Those that begin in text given out so far; only with logprobs."""
    num_tokens: int = 0
    """Generated, given out or not."""
    num_cached_tokens: int = 0
    """Of the prompt, found in the engine's cache; on the first delta."""
    finish_reason: str | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None


@dataclass(slots=True)
class Sequence:
    """All deltas of a sequence together."""

    text: str = ""
    tokens: list[TokenText] = field(default_factory=list)
    num_tokens: int = 0
    num_cached_tokens: int = 0
    finish_reason: str | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None

    def add(self, delta: Delta) -> None:
        self.text += delta.text
        self.tokens += delta.tokens
        self.num_tokens += delta.num_tokens
        self.num_cached_tokens = max(self.num_cached_tokens, delta.num_cached_tokens)
        self.finish_reason = delta.finish_reason or self.finish_reason
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs

    @property
    def mean_logprob(self) -> float:
        logprobs = [token.logprob for token in self.tokens if token.logprob is not None]
        return sum(logprobs) / len(logprobs) if logprobs else float("-inf")


async def generate_text(
    engine: Engine,
    live: LiveRelease,
    generation: Generation,
    stops: tuple[str, ...],
) -> AsyncGenerator[Delta, None]:
    """Closing the iterator frees the sequence's slot in the engine. Raises EngineError."""
    detokenizer = Detokenizer(live.tokenizer)
    stop_strings = StopStrings(stops)
    stop_ids = frozenset(generation.stop_token_ids)
    num_seen = 0
    length = 0
    """Characters of detokenised text."""
    given = 0
    """Characters that were given out."""
    held: list[TokenText] = []
    wants_logprobs = generation.num_logprobs is not None

    steps = engine.generate(live.id, generation)
    try:
        async for step in steps:
            text = ""
            stopped = False
            num_tokens = 0
            for position, token_id in enumerate(step.token_ids):
                num_tokens += 1
                num_seen += 1
                is_end = step.finish_reason == "stop" and position == len(step.token_ids) - 1
                if wants_logprobs:
                    held.append(_token_text(step, position, token_id, length))
                piece = "" if is_end and token_id in stop_ids else detokenizer.add(token_id)
                length += len(piece)
                if num_seen < generation.min_tokens:
                    text += piece
                    continue
                safe, stopped = stop_strings.add(piece)
                text += safe
                if stopped:
                    break
            finish_reason = "stop" if stopped else step.finish_reason
            if finish_reason is not None and not stopped:
                safe, stopped = stop_strings.add(detokenizer.flush())
                text += safe if stopped else safe + stop_strings.flush()
                finish_reason = "stop" if stopped else finish_reason
            given += len(text)
            tokens = tuple(
                token
                for token in held
                if token.offset < given or (finish_reason is not None and not stopped)
            )
            held = [] if finish_reason else held[len(tokens) :]
            yield Delta(
                text=text,
                tokens=tokens,
                num_tokens=num_tokens,
                num_cached_tokens=step.num_cached_tokens,
                finish_reason=finish_reason,
                prompt_logprobs=step.prompt_logprobs,
            )
            if finish_reason is not None:
                return
    finally:
        await steps.aclose()  # type: ignore[attr-defined]


def _token_text(step: Step, position: int, token_id: int, offset: int) -> TokenText:
    if position >= len(step.logprobs):
        return TokenText(token_id=token_id, offset=offset)
    found = step.logprobs[position]
    return TokenText(token_id=token_id, offset=offset, logprob=found.logprob, top=found.top)
