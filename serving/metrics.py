"""Prometheus metrics of one server, in a registry of its own."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from serving.swap_schemas import SwapResult

NUM_KNOWN_RELEASES = 16
_LATENCY = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
_INTERVAL = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2)


class WaitingRequest:
    """One request in the count of those that wait, until its first step or its own end."""

    def __init__(self, waiting: Gauge) -> None:
        self._waiting: Gauge | None = waiting
        waiting.inc()

    def end(self) -> None:
        """Every call but the first does nothing."""
        if self._waiting is not None:
            self._waiting.dec()
            self._waiting = None


class Metrics:
    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self._known: list[str] = []
        self.requests = Counter(
            "serving_requests",
            "Requests by route and HTTP status",
            ["route", "status"],
            registry=registry,
        )
        self.answers = Counter(
            "serving_answers",
            "Requests that a release was found for",
            ["release"],
            registry=registry,
        )
        self.prompt_tokens = Counter(
            "serving_prompt_tokens",
            "Prompt tokens read",
            ["release"],
            registry=registry,
        )
        self.new_tokens = Counter(
            "serving_generated_tokens",
            "Tokens generated",
            ["release"],
            registry=registry,
        )
        self.first_token_seconds = Histogram(
            "serving_first_token_seconds",
            "From the request to its first token",
            ["release"],
            buckets=_LATENCY,
            registry=registry,
        )
        self.token_interval_seconds = Histogram(
            "serving_token_interval_seconds",
            "Between two tokens of one sequence; of an answer that is no stream, a mean of several",
            ["release"],
            buckets=_INTERVAL,
            registry=registry,
        )
        self.in_flight = Gauge(
            "serving_requests_in_flight",
            "Requests being answered",
            registry=registry,
        )
        self.waiting = Gauge(
            "serving_requests_waiting",
            "Requests without a first step: held at the barrier, or queued by the engine",
            registry=registry,
        )
        self.live = Gauge(
            "serving_release_live",
            "1 for the release that is live",
            ["release"],
            registry=registry,
        )
        self.swaps = Counter(
            "serving_swaps",
            "Swaps by result",
            ["result"],
            registry=registry,
        )
        self.swap_seconds = Histogram(
            "serving_swap_seconds",
            "Time spent in a phase of a swap",
            ["phase"],
            buckets=(0.001, 0.01, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 300),
            registry=registry,
        )

    def count_swap(self, result: SwapResult) -> None:
        self.swaps.labels(result.result).inc()
        for phase, seconds in result.seconds.items():
            self.swap_seconds.labels(phase).observe(seconds)
        if result.result == "live":
            self.live.clear()
            self.live.labels(result.release).set(1)
            self._know(result.release)

    def _know(self, release_id: str) -> None:
        """Keep the series of the last few: a server that swaps for months must not grow."""
        if release_id in self._known:
            self._known.remove(release_id)
        self._known.append(release_id)
        for forgotten in self._known[:-NUM_KNOWN_RELEASES]:
            for metric in (
                self.answers,
                self.prompt_tokens,
                self.new_tokens,
                self.first_token_seconds,
                self.token_interval_seconds,
            ):
                metric.remove_by_labels({"release": forgotten})
        del self._known[:-NUM_KNOWN_RELEASES]

    def render(self) -> bytes:
        """Prometheus text format."""
        return generate_latest(self.registry)
