"""The runner's Prometheus metrics: the waiting and running jobs, the outcomes, and the seconds from
the arrival of a commit until its release is served."""

from collections import Counter as Counts
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, start_http_server
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from jobs.errors import StoreError
from jobs.job import Job
from jobs.store import JobStore

_SECONDS = (0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800, 3600, 14400)


class RunnerMetrics:
    """The metrics, in a registry of their own. The counters begin at 0 each time a runner starts.
    Prometheus detects that a counter was reset, and still computes the right rates."""

    def __init__(self, store: JobStore) -> None:
        self._store = store
        self.registry = CollectorRegistry()
        self.registry.register(_QueueCollector(store))
        self._outcomes = Counter(
            "pipeline_outcomes",
            "Jobs that ended, by outcome",
            ["pipeline", "result"],
            registry=self.registry,
        )
        self._job_seconds = Histogram(
            "pipeline_job_seconds",
            "Seconds from the start of a job to its outcome, whatever the outcome is",
            ["pipeline"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._commit_to_serving = Histogram(
            "pipeline_commit_to_serving_seconds",
            "Seconds from the arrival of a job's first commit until its release was served",
            ["pipeline"],
            buckets=_SECONDS,
            registry=self.registry,
        )

    def count(self, job: Job) -> None:
        """Count the outcome of a job that has ended. Does nothing for a job of no pipeline, and for
        a job without an outcome. Raises StoreError."""
        if job.outcome is None or job.spec.pipeline is None or job.ended_at is None:
            return
        name = job.spec.pipeline
        self._outcomes.labels(name, job.outcome.result).inc()
        if job.started_at is not None:
            self._job_seconds.labels(name).observe(job.ended_at - job.started_at)
        if job.outcome.result == "promoted" and not job.by_hand:  # no commit arrived for it
            self._commit_to_serving.labels(name).observe(
                job.ended_at - self._store.waited_since(job)
            )

    def serve(self, port: int) -> None:
        """Serve the metrics on loopback, in a thread that ends with the process. Raises OSError."""
        start_http_server(port, addr="127.0.0.1", registry=self.registry)


class _QueueCollector(Collector):
    """Counts the waiting and running jobs each time Prometheus asks for the metrics. The numbers
    come from the job store, because a count in the runner's memory would be lost if the runner was
    killed."""

    def __init__(self, store: JobStore) -> None:
        self._store = store

    def collect(self) -> Iterator[GaugeMetricFamily]:
        jobs = GaugeMetricFamily(
            "pipeline_jobs", "Jobs that have not ended", labels=["pipeline", "state"]
        )
        age = GaugeMetricFamily(
            "pipeline_queue_age_seconds",
            "Seconds that the oldest waiting commit has waited for its job to start",
            labels=["pipeline"],
        )
        try:
            now = self._store.now()
            pending = self._store.list(state="SCHEDULING")
            running = self._store.list(state="RUNNING")
            since = [(job.spec.pipeline or "", self._store.waited_since(job)) for job in pending]
        except StoreError:
            # Return no sample, because missing metrics are better than wrong numbers. A monitor can
            # notice that metrics are missing.
            return
        # Prometheus allows only one sample for each set of labels, so count all jobs of a pipeline
        # in one sample.
        for state, found in (("scheduling", pending), ("running", running)):
            for name, count in Counts(job.spec.pipeline or "" for job in found).items():
                jobs.add_metric([name, state], count)
        for name in dict(since):
            age.add_metric([name], now - min(moment for each, moment in since if each == name))
        yield jobs
        yield age
