"""The Prometheus metrics of one server, in their own registry.

Values that vLLM also measures appear a second time under vLLM's names, so that dashboards and
autoscalers made for vLLM work. The names are those in `vllm/v1/metrics/loggers.py` of vLLM 0.32.
"""

import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from serving.swap_schemas import SwapResult

NUM_KNOWN_RELEASES = 16
"""How many releases have series with their id as a label: those that became live last."""
# The upper bounds of the buckets: `_TOKENS` in tokens, the others in seconds.
_LATENCY = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
_REQUEST = (0.1, 0.2, 0.5, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
_INTERVAL = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2)


class WaitingRequest:
    """Counts one request as waiting, from the moment when this object is made until `end`. Call
    `end` at the first step of the request, and also when the request ends without a step."""

    def __init__(self, metrics: "Metrics") -> None:
        self._metrics: Metrics | None = metrics
        metrics.num_waiting += 1

    def end(self) -> None:
        """Stop counting the request. Only the first call has an effect."""
        if self._metrics is not None:
            self._metrics.num_waiting -= 1
            self._metrics = None


class VllmMetrics:
    """The metrics with vLLM's names. Their label `engine` is always 0, because a server has only
    one engine."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        labels = ("model_name", "engine")
        values = (model_name, "0")

        def counter(name: str, text: str) -> Counter:
            return Counter(f"vllm:{name}", text, labels, registry=registry).labels(*values)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"vllm:{name}", text, labels, registry=registry).labels(*values)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(f"vllm:{name}", text, labels, buckets=buckets, registry=registry)
            return made.labels(*values)

        self.running = gauge("num_requests_running", "Running requests that have a first token")
        self.waiting = gauge("num_requests_waiting", "Requests that have no token yet")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens")
        self.generation_tokens = counter("generation_tokens", "Generated tokens")
        self.cache_queries = counter(
            "prefix_cache_queries", "Prompt tokens that the engine looked up in its prefix cache"
        )
        self.cache_hits = counter(
            "prefix_cache_hits", "Prompt tokens that the engine found in its prefix cache"
        )
        self.first_token = histogram(
            "time_to_first_token_seconds", "Time from the request to its first token", _LATENCY
        )
        self.interval = histogram(
            "inter_token_latency_seconds", "Time between two tokens of one sequence", _INTERVAL
        )
        self.request = histogram(
            "e2e_request_latency_seconds", "Time from a request to the end of its answer", _REQUEST
        )
        self.request_prompt = histogram(
            "request_prompt_tokens", "Prompt tokens of one request", _TOKENS
        )
        self.request_new = histogram(
            "request_generation_tokens", "Generated tokens of one request", _TOKENS
        )
        self._success = Counter(
            "vllm:request_success",
            "Sequences that have ended, by finish reason",
            (*labels, "finished_reason"),
            registry=registry,
        )
        self._values = values

    def count_end(self, finish_reason: str) -> None:
        """Count a sequence that has ended."""
        self._success.labels(*self._values, finish_reason).inc()


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

    def watch(self, num_in_flight: Callable[[], int]) -> None:
        """Call `num_in_flight` whenever the metrics are read. It returns how many requests have a
        release and have not ended."""
        self.in_flight.set_function(num_in_flight)
        # The barrier of a swap holds back requests that wait and are not in flight yet. So the
        # difference may be negative.
        self.vllm.waiting.set_function(lambda: self.num_waiting)
        self.vllm.running.set_function(lambda: max(0, num_in_flight() - self.num_waiting))

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

    def __init__(self, metrics: Metrics, release_id: str, started: float, num_prompt: int) -> None:
        """`started` is the time when the request arrived: a value of `time.perf_counter`.
        `num_prompt` is the number of its prompt tokens."""
        self._first = metrics.first_token_seconds.labels(release_id)
        self._interval = metrics.token_interval_seconds.labels(release_id)
        self._new_tokens = metrics.new_tokens.labels(release_id)
        self._vllm = metrics.vllm
        self._started = started
        self._before: dict[int, float] = {}
        """Index of a sequence → time of its last step."""
        self._num_new = 0
        self._num_prompt = num_prompt
        metrics.answers.labels(release_id).inc()
        metrics.prompt_tokens.labels(release_id).inc(num_prompt)
        self._vllm.prompt_tokens.inc(num_prompt)

    def add(self, index: int, num_tokens: int, finish_reason: str | None) -> None:
        """Record a step that added `num_tokens` tokens to the sequence with this index."""
        now = time.perf_counter()
        before = self._before.get(index)
        if before is None:
            self._first.observe(now - self._started)
            self._vllm.first_token.observe(now - self._started)
        else:
            for _ in range(num_tokens):
                self._interval.observe((now - before) / num_tokens)
                self._vllm.interval.observe((now - before) / num_tokens)
        self._before[index] = now
        self._num_new += num_tokens
        self._new_tokens.inc(num_tokens)
        self._vllm.generation_tokens.inc(num_tokens)
        if finish_reason is not None:
            self._vllm.count_end(finish_reason)

    def end(self, num_cached: int) -> None:
        """Record that all sequences have ended. `num_cached` is the number of prompt tokens that
        the engine found in its cache."""
        self._vllm.request.observe(time.perf_counter() - self._started)
        self._vllm.request_prompt.observe(self._num_prompt)
        self._vllm.request_new.observe(self._num_new)
        self._vllm.cache_queries.inc(self._num_prompt)
        self._vllm.cache_hits.inc(num_cached)
