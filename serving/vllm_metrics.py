"""The metrics under vLLM's names, for dashboards and autoscalers that were made for vLLM.

The names and buckets are those of vLLM 0.32, in `vllm/v1/metrics/loggers.py` and `buckets.py`
beside it.
"""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from serving.engine import Waits

# The upper bounds of the buckets: `_TOKENS` in tokens, the others in seconds.
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
_VLLM_FIRST_TOKEN = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
_VLLM_INTERVAL = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75,
    1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
_VLLM_REQUEST = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip


class VllmMetrics:
    """The metrics with vLLM's names. In these metrics, a request is one sequence, as in vLLM: a
    body with two prompts and `n: 3` counts as six. The label `engine` is always 0, because a server
    has only one engine."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
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
            _VLLM_FIRST_TOKEN,
        )
        self.interval = histogram(
            "inter_token_latency_seconds", "Time between two tokens of a sequence", _VLLM_INTERVAL
        )
        self._latency = histogram(
            "e2e_request_latency_seconds",
            "Time from the request to the end of a sequence",
            _VLLM_REQUEST,
        )
        self._queue = histogram(
            "request_queue_time_seconds",
            "Time until the engine began to compute the prompt of a sequence that has ended",
            _VLLM_REQUEST,
        )
        self._prefill = histogram(
            "request_prefill_time_seconds",
            "Time to compute the prompt and the first token of a sequence that has ended",
            _VLLM_REQUEST,
        )
        self._decode = histogram(
            "request_decode_time_seconds",
            "Time from the first to the last token of a sequence that has ended",
            _VLLM_REQUEST,
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
