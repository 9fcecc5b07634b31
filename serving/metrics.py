"""The Prometheus metrics of one server, in their own registry."""

import time
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from serving.detokenizer import Delta
from serving.engine import Waits
from serving.swap_schemas import SwapResult
from serving.vllm_metrics import VllmMetrics

NUM_KNOWN_RELEASES = 16
"""How many releases have series with their id as a label: the releases that became live last."""
# The upper bounds of the buckets, in seconds.
_LATENCY = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
_INTERVAL = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2)


class WaitingRequest:
    """Counts one request and its sequences as waiting, from the moment when this object is made.

    The request waits until its first step. Each sequence waits until its own first step, because it
    may have to wait for a place in the engine while other sequences of the request run. Call `end`
    when the request ends, in whatever way.
    """

    def __init__(self, metrics: "Metrics", num_sequences: int) -> None:
        self._metrics = metrics
        self._num_requests = 1
        self._num_sequences = num_sequences
        metrics.num_waiting += 1
        metrics.vllm.num_waiting += num_sequences

    def begin_sequence(self) -> None:
        """Stop counting one sequence, because it has its first step."""
        self._stop_counting(1)

    def end(self) -> None:
        """Stop counting all sequences that still wait. Only the first call has an effect."""
        self._stop_counting(self._num_sequences)

    def _stop_counting(self, num_sequences: int) -> None:
        self._metrics.num_waiting -= self._num_requests
        self._metrics.vllm.num_waiting -= num_sequences
        self._num_requests = 0
        self._num_sequences -= num_sequences


class Metrics:
    """All metrics of one server. `model_name` is the label `model_name` of vLLM's metrics."""

    def __init__(self, model_name: str) -> None:
        registry = self.registry = CollectorRegistry()
        self.vllm = VllmMetrics(registry, model_name)
        self._recent_releases: list[str] = []
        self.requests = Counter(
            "serving_requests",
            "Requests that have ended, by route and HTTP status",
            ["route", "status"],
            registry=registry,
        )
        self.answers = Counter(
            "serving_answers",
            "Requests whose generation has begun, by release",
            ["release"],
            registry=registry,
        )
        self.prompt_tokens = Counter(
            "serving_prompt_tokens",
            "Prompt tokens of the requests whose generation has begun, by release",
            ["release"],
            registry=registry,
        )
        self.new_tokens = Counter(
            "serving_generated_tokens",
            "Generated tokens, by release",
            ["release"],
            registry=registry,
        )
        self.first_token_seconds = Histogram(
            "serving_first_token_seconds",
            "Time from the request to the first token of each of its sequences",
            ["release"],
            buckets=_LATENCY,
            registry=registry,
        )
        self.token_interval_seconds = Histogram(
            "serving_token_interval_seconds",
            "Time between two tokens of one sequence; if several arrive in one step, the mean time",
            ["release"],
            buckets=_INTERVAL,
            registry=registry,
        )
        self.in_flight = Gauge(
            "serving_requests_in_flight",
            "Requests that have a release and have not ended",
            registry=registry,
        )
        self.waiting = Gauge(
            "serving_requests_waiting",
            "Requests that have no token yet: the barrier of a swap holds them back, they wait in "
            "the engine, or the engine computes their prompt",
            registry=registry,
        )
        self.num_waiting = 0
        self.waiting.set_function(lambda: self.num_waiting)
        self.live = Gauge(
            "serving_release_live",
            "1 for the live release",
            ["release"],
            registry=registry,
        )
        self.swaps = Counter(
            "serving_swaps",
            "Swaps that have ended, by result",
            ["result"],
            registry=registry,
        )
        self.swap_seconds = Histogram(
            "serving_swap_seconds",
            "Time of one phase of a swap",
            ["phase"],
            buckets=(0.001, 0.01, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 300),
            registry=registry,
        )

    def count_swap(self, result: SwapResult) -> None:
        """Count a swap that has ended, and the time of each of its phases."""
        self.swaps.labels(result.result).inc()
        for phase, seconds in result.seconds.items():
            self.swap_seconds.labels(phase).observe(seconds)
        if result.result == "live":
            self.live.clear()
            self.live.labels(result.release).set(1)
            self._keep_recent_series(result.release)

    def _keep_recent_series(self, release_id: str) -> None:
        """Remove the series of all but the last `NUM_KNOWN_RELEASES` live releases. Otherwise the
        memory of a server that swaps for months would grow."""
        if release_id in self._recent_releases:
            self._recent_releases.remove(release_id)
        self._recent_releases.append(release_id)
        for forgotten in self._recent_releases[:-NUM_KNOWN_RELEASES]:
            for metric in (
                self.answers,
                self.prompt_tokens,
                self.new_tokens,
                self.first_token_seconds,
                self.token_interval_seconds,
            ):
                metric.remove_by_labels({"release": forgotten})
        del self._recent_releases[:-NUM_KNOWN_RELEASES]

    def render(self) -> bytes:
        """The metrics in the text format of Prometheus."""
        return generate_latest(self.registry)


class RequestTimes:
    """Measures one admitted request, from its arrival to its end."""

    def __init__(
        self,
        metrics: Metrics,
        waiting: WaitingRequest,
        *,
        release_id: str,
        started: float,
        num_prompt: int,
        prompt_lengths: Sequence[int],
        num_each: int,
    ) -> None:
        """`started` is the time when the request arrived: a value of `time.perf_counter`.
        `num_prompt` is the number of tokens in all prompts of the request. `prompt_lengths` has one
        entry for each sequence: the number of tokens in its prompt. `num_each` sequences in a row
        have the same prompt."""
        self._first = metrics.first_token_seconds.labels(release_id)
        self._interval = metrics.token_interval_seconds.labels(release_id)
        self._new_tokens = metrics.new_tokens.labels(release_id)
        self._vllm = metrics.vllm
        self._waiting = waiting
        self._started = started
        self._prompt_lengths = prompt_lengths
        self._before: dict[int, float] = {}
        """Index of a running sequence → time of its last step."""
        self._begun: dict[int, tuple[float, Waits | None]] = {}
        """Index of a running sequence → time of its first step, and its waits."""
        self._num_each = num_each
        self._num_ended = [0] * (len(prompt_lengths) // num_each)
        """How many sequences of each prompt have ended."""
        self._num_new = [0] * len(prompt_lengths)
        metrics.answers.labels(release_id).inc()
        metrics.prompt_tokens.labels(release_id).inc(num_prompt)

    def add(self, index: int, delta: Delta) -> None:
        """Record the next delta of the sequence with this index."""
        now = time.perf_counter()
        before = self._before.get(index)
        if before is None:
            self._begin(index, now, delta)
        else:
            for _ in range(delta.num_tokens):
                self._interval.observe((now - before) / delta.num_tokens)
                self._vllm.interval.observe((now - before) / delta.num_tokens)
        self._before[index] = now
        self._num_new[index] += delta.num_tokens
        self._new_tokens.inc(delta.num_tokens)
        self._vllm.generation_tokens.inc(delta.num_tokens)
        if delta.num_preemptions:
            self._vllm.preemptions.inc(delta.num_preemptions)
        if delta.finish_reason is not None:
            self._end(index, now, delta.finish_reason)

    def end(self) -> None:
        """Stop counting the sequences that have not ended, because the request has ended."""
        self._vllm.num_running -= len(self._before)
        self._before.clear()

    def _begin(self, index: int, now: float, delta: Delta) -> None:
        self._begun[index] = now, delta.waits
        self._waiting.begin_sequence()
        self._vllm.num_running += 1
        self._first.observe(now - self._started)
        self._vllm.first_token.observe(now - self._started)
        num_prompt = self._prompt_lengths[index]
        self._vllm.prompt_tokens.inc(num_prompt)
        self._vllm.cache_queries.inc(num_prompt)
        self._vllm.cache_hits.inc(delta.num_cached_tokens)

    def _end(self, index: int, now: float, finish_reason: str) -> None:
        del self._before[index]
        begun, waits = self._begun.pop(index)
        self._vllm.num_running -= 1
        self._vllm.count_end(
            finish_reason,
            seconds=now - self._started,
            decode_seconds=now - begun,
            waits=waits,
            num_prompt=self._prompt_lengths[index],
            num_new=self._num_new[index],
        )
        which = index // self._num_each
        self._num_ended[which] += 1
        if self._num_ended[which] == self._num_each:
            first = which * self._num_each
            self._vllm.longest.observe(max(self._num_new[first : first + self._num_each]))
