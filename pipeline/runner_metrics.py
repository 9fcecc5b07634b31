"""What the runner tells Prometheus: the queue, outcomes, and the seconds from commit to serving."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, start_http_server
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from jobs.errors import StoreError
from jobs.record import Job
from jobs.store import JobStore

_SECONDS = (0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800, 3600, 14400)


class RunnerMetrics:
    """In a registry of its own. Counters begin at 0 with each runner, as Prometheus expects."""

    def __init__(self, store: JobStore) -> None:
        self._store = store
        self.registry = CollectorRegistry()
        self.registry.register(_Queue(store))
        self._outcomes = Counter(
            "pipeline_outcomes",
            "Jobs that ended, by outcome",
            ["pipeline", "result"],
            registry=self.registry,
        )
        self._job_seconds = Histogram(
            "pipeline_job_seconds",
            "From the start of a job to its outcome, whatever it is",
            ["pipeline"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._commit_to_serving = Histogram(
            "pipeline_commit_to_serving_seconds",
            "From the first commit of a job, as it was received, to its release being served",
            ["pipeline"],
            buckets=_SECONDS,
            registry=self.registry,
        )

    def count(self, job: Job) -> None:
        """Raises StoreError."""
        if job.outcome is None or job.spec.pipeline is None or job.ended_at is None:
            return
        name = job.spec.pipeline
        self._outcomes.labels(name, job.outcome.result).inc()
        if job.started_at is not None:
            self._job_seconds.labels(name).observe(job.ended_at - job.started_at)
        if job.outcome.result == "promoted":
            self._commit_to_serving.labels(name).observe(
                job.ended_at - self._store.waited_since(job)
            )

    def serve(self, port: int) -> None:
        """On loopback only, from a thread that ends with the process. Raises OSError."""
        start_http_server(port, addr="127.0.0.1", registry=self.registry)


class _Queue(Collector):
    """Read from the store when Prometheus asks, so that it is right also after a kill."""

    def __init__(self, store: JobStore) -> None:
        self._store = store

    def collect(self) -> Iterator[GaugeMetricFamily]:
        jobs = GaugeMetricFamily(
            "pipeline_jobs", "Jobs that have not ended", labels=["pipeline", "state"]
        )
        age = GaugeMetricFamily(
            "pipeline_queue_age_seconds",
            "Since the first commit that waits for a job to begin",
            labels=["pipeline"],
        )
        try:
            now = self._store.now()
            for state in ("SCHEDULING", "RUNNING"):
                for job in self._store.list(state=state):
                    name = job.spec.pipeline or ""
                    jobs.add_metric([name, state.lower()], 1)
                    if state == "SCHEDULING":
                        age.add_metric([name], now - self._store.waited_since(job))
        except StoreError:
            return  # a scrape without these is how a monitor sees that the store is in trouble
        yield jobs
        yield age
