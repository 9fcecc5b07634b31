"""The metrics of a hub. Each hub has its own registry, so that two hubs in one process do not mix
their metrics."""

from prometheus_client import CollectorRegistry, Counter, Histogram


class HubMetrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.deliveries = Counter(
            "hub_delivery_attempts",
            "Attempts to deliver by result",
            ["result"],
            registry=self.registry,
        )
        self.worker_failures = Counter(
            "hub_worker_failures",
            "Unexpected errors of the deliverer by worker (dispatcher, webhook, attempt); "
            "deliveries went on after each error",
            ["worker"],
            registry=self.registry,
        )
        self.delivery_seconds = Histogram(
            "hub_delivery_seconds",
            "Seconds from the event, or from a replay, to the 2xx answer",
            buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5, 30, 300, 3600),
            registry=self.registry,
        )
