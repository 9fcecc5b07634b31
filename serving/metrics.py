"""The Prometheus metrics of one server, in their own registry.

The metrics of requests have the names and buckets of vLLM 0.32 (`vllm/v1/metrics/loggers.py` and
`buckets.py` beside it), for dashboards and autoscalers that were made for vLLM.
"""

import time
from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from serving.detokenizer import Delta
from serving.engine import Waits
from serving.swap_schemas import SwapResult

# The upper bounds of the buckets: `_TOKENS` in tokens, the others in seconds.
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
_FIRST_TOKEN = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
_INTERVAL = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75,
    1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
_REQUEST = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip


class WaitingRequest:
    """Counts the sequences of one request as waiting, from the moment when this object is made.

    Each sequence waits until its own first step, because it may have to wait for a place in the
    engine while other sequences of the request run. Call `end` when the request ends, in whatever
    way.
    """

    def __init__(self, metrics: "Metrics", num_sequences: int) -> None:
        self._metrics = metrics
        self._num_sequences = 0
        self._count(num_sequences)

    def begin_sequence(self) -> None:
        """Stop counting one sequence, because it has its first step."""
        self._count(-1)

    def end(self) -> None:
        """Stop counting all sequences that still wait. Only the first call has an effect."""
        self._count(-self._num_sequences)

    def _count(self, change: int) -> None:
        self._num_sequences += change
        self._metrics.num_waiting += change


class Metrics:
    """All metrics of one server. `model_name` is the label `model_name` of vLLM's metrics.

    In vLLM's metrics, a request is one sequence: a body with two prompts and `n: 3` counts as six.
    The label `engine` is always 0, because a server has only one engine.
    """

    def __init__(self, model_name: str) -> None:
        registry = self.registry = CollectorRegistry()
        self.requests = Counter(
            "serving_requests",
            "Requests that have ended, by route and HTTP status",
            ["route", "status"],
            registry=registry,
        )
        self._live = Gauge(
            "serving_release_live", "1 for the live release", ["release"], registry=registry
        )
        self._swaps = Counter(
            "serving_swaps", "Swaps that have ended, by result", ["result"], registry=registry
        )
        self._swap_seconds = Histogram(
            "serving_swap_seconds",
            "Time of one phase of a swap",
            ["phase"],
            buckets=(0.001, 0.01, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 300),
            registry=registry,
        )
        labels = ("model_name", "engine")
        values = (model_name, "0")

        def counter(name: str, text: str) -> Counter:
            return Counter(f"vllm:{name}", text, labels, registry=registry).labels(*values)

        def gauge(name: str, text: str, value: Callable[[], float]) -> None:
            made = Gauge(f"vllm:{name}", text, labels, registry=registry).labels(*values)
            made.set_function(value)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(f"vllm:{name}", text, labels, buckets=buckets, registry=registry)
            return made.labels(*values)

        self._gauge = gauge
        self.num_running = 0
        self.num_waiting = 0
        gauge("num_requests_running", "Sequences that have a token", lambda: self.num_running)
        gauge("num_requests_waiting", "Sequences without a token", lambda: self.num_waiting)
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of sequences with a token")
        self.generation_tokens = counter("generation_tokens", "Generated tokens")
        self.cache_queries = counter(
            "prefix_cache_queries", "Prompt tokens that the engine looked up in its prefix cache"
        )
        self.cache_hits = counter(
            "prefix_cache_hits", "Prompt tokens that the engine found in its prefix cache"
        )
        self.first_token = histogram(
            "time_to_first_token_seconds",
            "Time from the request to the first token of a sequence",
            _FIRST_TOKEN,
        )
        self.interval = histogram(
            "inter_token_latency_seconds", "Time between two tokens of a sequence", _INTERVAL
        )
        self._latency = histogram(
            "e2e_request_latency_seconds",
            "Time from the request to the end of a sequence",
            _REQUEST,
        )
        self._queue = histogram(
            "request_queue_time_seconds",
            "Time until the engine began to compute the prompt of a sequence that has ended",
            _REQUEST,
        )
        self._prefill = histogram(
            "request_prefill_time_seconds",
            "Time to compute the prompt and the first token of a sequence that has ended",
            _REQUEST,
        )
        self._decode = histogram(
            "request_decode_time_seconds",
            "Time from the first to the last token of a sequence that has ended",
            _REQUEST,
        )
        self.preemptions = counter(
            "num_preemptions",
            "How often a sequence lost its memory to older sequences, and waited again",
        )
        self.longest = histogram(
            "request_max_num_generation_tokens",
            "Generated tokens of the longest of the sequences that have the same prompt",
            _TOKENS,
        )
        self._request_prompt = histogram(
            "request_prompt_tokens", "Prompt tokens of a sequence that has ended", _TOKENS
        )
        self._request_new = histogram(
            "request_generation_tokens", "Generated tokens of a sequence that has ended", _TOKENS
        )
        success = Counter(
            "vllm:request_success",
            "Sequences that have ended, by finish reason",
            (*labels, "finished_reason"),
            registry=registry,
        )
        # Without a first value of 0, dashboards would not see the first increase.
        self._success = {reason: success.labels(*values, reason) for reason in ("stop", "length")}

    def watch_kv_cache(self, usage: Callable[[], float]) -> None:
        """Call `usage` whenever the metrics are read. It returns `Engine.kv_cache_usage`."""
        self._gauge("kv_cache_usage_perc", "KV cache in use; 1 means all of it", usage)

    def count_end(
        self,
        finish_reason: str,
        *,
        seconds: float,
        decode_seconds: float,
        waits: Waits | None,
        num_prompt: int,
        num_new: int,
    ) -> None:
        """Count a sequence that has ended."""
        self._success[finish_reason].inc()
        self._latency.observe(seconds)
        self._decode.observe(decode_seconds)
        if waits is not None:
            self._queue.observe(waits.queue_seconds)
            self._prefill.observe(waits.prefill_seconds)
        self._request_prompt.observe(num_prompt)
        self._request_new.observe(num_new)

    def count_swap(self, result: SwapResult) -> None:
        """Count a swap that has ended, and the time of each of its phases."""
        self._swaps.labels(result.result).inc()
        for phase, seconds in result.seconds.items():
            self._swap_seconds.labels(phase).observe(seconds)
        if result.result == "live":
            self._live.clear()
            self._live.labels(result.release).set(1)

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
        started: float,
        prompt_lengths: Sequence[int],
        num_each: int,
    ) -> None:
        """`started` is the time when the request arrived: a value of `time.perf_counter`.
        `prompt_lengths` has one entry for each sequence: the number of tokens in its prompt.
        `num_each` sequences in a row have the same prompt."""
        self._metrics = metrics
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

    def add(self, index: int, delta: Delta) -> None:
        """Record the next delta of the sequence with this index."""
        now = time.perf_counter()
        before = self._before.get(index)
        if before is None:
            self._begin(index, now, delta)
        else:
            for _ in range(delta.num_tokens):
                self._metrics.interval.observe((now - before) / delta.num_tokens)
        self._before[index] = now
        self._num_new[index] += delta.num_tokens
        self._metrics.generation_tokens.inc(delta.num_tokens)
        if delta.num_preemptions:
            self._metrics.preemptions.inc(delta.num_preemptions)
        if delta.finish_reason is not None:
            self._end(index, now, delta.finish_reason)

    def end(self) -> None:
        """Stop counting the sequences that have not ended, because the request has ended."""
        self._metrics.num_running -= len(self._before)
        self._before.clear()

    def _begin(self, index: int, now: float, delta: Delta) -> None:
        self._begun[index] = now, delta.waits
        self._waiting.begin_sequence()
        self._metrics.num_running += 1
        self._metrics.first_token.observe(now - self._started)
        num_prompt = self._prompt_lengths[index]
        self._metrics.prompt_tokens.inc(num_prompt)
        self._metrics.cache_queries.inc(num_prompt)
        self._metrics.cache_hits.inc(delta.num_cached_tokens)

    def _end(self, index: int, now: float, finish_reason: str) -> None:
        del self._before[index]
        begun, waits = self._begun.pop(index)
        self._metrics.num_running -= 1
        self._metrics.count_end(
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
            self._metrics.longest.observe(max(self._num_new[first : first + self._num_each]))
