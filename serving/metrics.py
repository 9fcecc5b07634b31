"""The Prometheus metrics of one server, in their own registry.

The metrics of requests have the names and buckets of vLLM 0.32 (`vllm/v1/metrics/loggers.py` and
`buckets.py` beside it), for dashboards and autoscalers that were made for vLLM.
"""

import time
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics import MetricWrapperBase

from serving.detokenizer import Delta
from serving.engine import Waits
from serving.swap_schemas import SwapResult

M = TypeVar("M", bound=MetricWrapperBase)

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


_HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "time_to_first_token_seconds": ("Time from the request to the first token", _FIRST_TOKEN),
    "inter_token_latency_seconds": ("Time between two tokens of a sequence", _INTERVAL),
    # The others are observed when a sequence has ended.
    "e2e_request_latency_seconds": ("Time from the request to the end", _REQUEST),
    "request_queue_time_seconds": ("Time until the engine began to compute the prompt", _REQUEST),
    "request_prefill_time_seconds": ("Time to compute the prompt and the first token", _REQUEST),
    "request_decode_time_seconds": ("Time from the first to the last token", _REQUEST),
    "request_prompt_tokens": ("Prompt tokens of the sequence", _TOKENS),
    "request_generation_tokens": ("Generated tokens of the sequence", _TOKENS),
}
_COUNTERS = {
    "prompt_tokens": "Prompt tokens of sequences with a token",
    "generation_tokens": "Generated tokens",
    "prefix_cache_queries": "Prompt tokens that the engine looked up in its prefix cache",
    "prefix_cache_hits": "Prompt tokens that the engine found in its prefix cache",
    "num_preemptions": "How often a sequence lost its memory to older sequences, and waited again",
}


class Metrics:
    """All metrics of one server. `model_name` is the label `model_name` of vLLM's metrics.

    In vLLM's metrics, a request is one sequence: a body with two prompts and `n: 3` counts as six.
    The label `engine` is always 0, because a server has only one engine.
    """

    def __init__(self, model_name: str) -> None:
        registry = self.registry = CollectorRegistry()
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
        self._labels = labels = {"model_name": model_name, "engine": "0"}
        self.running = self._vllm(Gauge, "num_requests_running", "Sequences that have a token")
        self.waiting = self._vllm(Gauge, "num_requests_waiting", "Sequences without a token")
        usage = "KV cache in use; 1 means all of it"
        self.kv_cache_usage = self._vllm(Gauge, "kv_cache_usage_perc", usage)
        self.counters = {name: self._vllm(Counter, name, text) for name, text in _COUNTERS.items()}
        self.histograms = {
            name: self._vllm(Histogram, name, text, buckets=buckets)
            for name, (text, buckets) in _HISTOGRAMS.items()
        }
        success = Counter(
            "vllm:request_success",
            "Sequences that have ended, by finish reason",
            (*labels, "finished_reason"),
            registry=registry,
        )
        # Without a first value of 0, dashboards would not see the first increase.
        self.ended = {
            reason: success.labels(**labels, finished_reason=reason)
            for reason in ("stop", "length")
        }

    def _vllm(self, kind: type[M], name: str, text: str, **options: Any) -> M:
        metric = kind(f"vllm:{name}", text, self._labels, registry=self.registry, **options)
        return metric.labels(**self._labels)

    def count_swap(self, result: SwapResult) -> None:
        """Count a swap that has ended, and the time of each of its phases."""
        self._swaps.labels(result.result).inc()
        for phase, seconds in result.seconds.items():
            self._swap_seconds.labels(phase).observe(seconds)
        if result.result == "live":
            self._live.clear()
            self._live.labels(result.release).set(1)


class RequestTimes:
    """Measures one request from its arrival, which is now, to its end.

    Each of its sequences counts as waiting until its own first step, because it may have to wait
    for a place in the engine while other sequences of the request run. Call `end` when the request
    ends, in whatever way.
    """

    def __init__(self, metrics: Metrics, num_sequences: int) -> None:
        self._metrics = metrics
        self._started = time.perf_counter()
        self._num_waiting = num_sequences
        metrics.waiting.inc(num_sequences)
        self._before: dict[int, float] = {}
        """Index of a running sequence → time of its last step."""
        self._begun: dict[int, tuple[float, Waits | None]] = {}
        """Index of a sequence → time of its first step, and its waits."""
        self.num_new = [0] * num_sequences
        """How many tokens each sequence has."""
        self.num_cached = [0] * num_sequences
        """How many prompt tokens of each sequence the engine found in its cache."""

    def add(self, index: int, delta: Delta, num_prompt: int) -> None:
        """Record the next delta of the sequence with this index, whose prompt has `num_prompt`
        tokens."""
        now, metrics, histograms = time.perf_counter(), self._metrics, self._metrics.histograms
        before = self._before.get(index)
        if before is None:
            self._begun[index] = now, delta.step.waits
            self.num_cached[index] = delta.step.num_cached_tokens
            self._num_waiting -= 1
            metrics.waiting.dec()
            metrics.running.inc()
            histograms["time_to_first_token_seconds"].observe(now - self._started)
            metrics.counters["prompt_tokens"].inc(num_prompt)
            metrics.counters["prefix_cache_queries"].inc(num_prompt)
            metrics.counters["prefix_cache_hits"].inc(delta.step.num_cached_tokens)
        else:
            for _ in range(delta.num_tokens):
                interval = (now - before) / delta.num_tokens
                histograms["inter_token_latency_seconds"].observe(interval)
        self._before[index] = now
        self.num_new[index] += delta.num_tokens
        metrics.counters["generation_tokens"].inc(delta.num_tokens)
        metrics.counters["num_preemptions"].inc(delta.step.num_preemptions)
        if delta.finish_reason is None:
            return
        del self._before[index]
        begun, waits = self._begun[index]
        metrics.running.dec()
        metrics.ended[delta.finish_reason].inc()
        histograms["e2e_request_latency_seconds"].observe(now - self._started)
        histograms["request_decode_time_seconds"].observe(now - begun)
        if waits is not None:
            histograms["request_queue_time_seconds"].observe(waits.queue_seconds)
            histograms["request_prefill_time_seconds"].observe(waits.prefill_seconds)
        histograms["request_prompt_tokens"].observe(num_prompt)
        histograms["request_generation_tokens"].observe(self.num_new[index])

    def end(self) -> None:
        """Stop counting the sequences that have not ended."""
        self._metrics.running.dec(len(self._before))
        self._metrics.waiting.dec(self._num_waiting)
