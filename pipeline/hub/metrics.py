"""What the hub counts, in a registry of its own so that two hubs in one process do not mix."""

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest


class HubMetrics:
    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.pushes = Counter(
            "hub_pushes",
            "Pushes that moved refs (ok), moved none (unchanged), failed (error)",
            ["result"],
            registry=self._registry,
        )
        self.events = Counter(
            "hub_events", "Events stored, by scope", ["scope"], registry=self._registry
        )
        self.deliveries = Counter(
            "hub_delivery_attempts",
            "Attempts to deliver, by result",
            ["result"],
            registry=self._registry,
        )
        self.worker_failures = Counter(
            "hub_worker_failures",
            "Errors that nobody foresaw and a worker outlived: dispatcher, webhook, attempt",
            ["worker"],
            registry=self._registry,
        )
        self.delivery_seconds = Histogram(
            "hub_delivery_seconds",
            "From the event stored to the 2xx answer",
            buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5, 30, 300, 3600),
            registry=self._registry,
        )

    def render(self) -> bytes:
        return generate_latest(self._registry)
