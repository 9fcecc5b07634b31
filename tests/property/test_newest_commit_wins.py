"""Whatever becomes of deliveries, jobs and runners: what is served was trained on the head, or the
last refusal names the head. A real store and real runners; the hub and the processes are a model.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from jobs.agent import Attempt
from jobs.attempt import record_result
from jobs.errors import HeadAway, LeaseLost, NoHead, PendingJob
from jobs.job import Delivery, Head, Job, delivery_ids
from jobs.outcome import JobOutcome
from jobs.runner import Runner
from jobs.settings import JobsSettings
from jobs.spec import JobSpec, RevisionRange
from jobs.store import JobStore
from tests.jobs_fixtures import Clock, answer_to, new_schema, postgres_server

__all__ = ["postgres_server"]

NUM_EXAMPLES = int(os.environ.get("NEWEST_COMMIT_EXAMPLES", "25"))
RESULTS = ("promoted", "promoted", "rejected", "failed", "passes", "killed")
RUNNERS = st.integers(0, 1)
SETTINGS = JobsSettings(lease_seconds=10, heartbeat_seconds=1e-9, retry_seconds=1e-9)


class Killed(BaseException):
    """The runner was killed."""


class Machine:
    """The agents of a machine: they end when the test says so, and outlive runners."""

    def __init__(self, store: JobStore) -> None:
        self.store = store
        self.kills_runner = False
        self.begins = True
        self.running: dict[str, Job] = {}
        """Owner → the job as it was when the attempt began."""

    def start(self, attempt: Attempt) -> None:
        if self.begins:
            id, owner = attempt.job.id, attempt.job.owner
            assert owner is not None
            self.running[owner] = self.store.started(id, owner, "elsewhere 1 boot")
        if self.kills_runner:
            raise Killed


class NewestCommit(RuleBasedStateMachine):
    url: str

    def __init__(self) -> None:
        super().__init__()
        self.folder = TemporaryDirectory()
        self.clock = Clock()
        self.store = JobStore.open(self.url, clock=self.clock)
        self.num_commits = 0
        self.history: list[str] = []
        """Every commit that was the head, the present head last."""
        self.is_away = self.is_deleted = False
        self.under_way: dict[str, str] = {}
        """The deliveries that have not arrived: id → the commit that it announces."""
        self.arrived: dict[str, str] = {}
        self.checked: tuple[dict[str, Job], dict[str, str]] | None = None
        """The jobs by id, and `arrived`, when the deliveries were checked last."""
        self.served: list[str] = []
        """The commits of the releases, the served one last."""
        self.is_rolled_back = False
        self.machines = [Machine(self.store), Machine(self.store)]
        self.runners = [self.new_runner(number) for number in range(2)]

    def new_runner(self, number: int) -> Runner:
        store = JobStore.open(self.url, clock=self.clock)
        start = self.machines[number].start
        jobs_dir = Path(self.folder.name)
        return Runner(store, jobs_dir, SETTINGS, {}, find_head=self.find_head, start_agent=start)

    def find_head(self, job: Job) -> Head:
        if self.is_away:
            raise HeadAway("the hub does not answer")
        if self.is_deleted:
            raise NoHead("there is no such branch")
        return Head(sha=self.history[-1], payload={"head": self.history[-1]})

    def teardown(self) -> None:
        self.settle()
        self.store.close()
        for runner in self.runners:
            runner._store.close()
        self.folder.cleanup()

    # The hub

    @rule(arrives=st.booleans())
    def push(self, arrives: bool) -> None:
        self.num_commits += 1
        self.move_head(f"c{self.num_commits}", arrives)

    @rule(data=st.data(), arrives=st.booleans())
    def force_push(self, data: st.DataObject, arrives: bool) -> None:
        if self.history:
            self.move_head(data.draw(st.sampled_from(self.history)), arrives)

    def move_head(self, commit: str, arrives: bool) -> None:
        self.is_deleted = False
        self.history.append(commit)
        self.under_way[f"d{len(self.history)}"] = commit
        if arrives:
            self.submit(f"d{len(self.history)}", commit)

    @rule(data=st.data(), is_lost=st.integers(0, 3).map(lambda drawn: drawn == 0))
    def deliver(self, data: st.DataObject, is_lost: bool) -> None:
        """In any order."""
        if self.under_way:
            id = data.draw(st.sampled_from(sorted(self.under_way)))
            if is_lost:
                del self.under_way[id]
            else:
                self.submit(id, self.under_way[id])

    @rule(data=st.data())
    def deliver_again(self, data: st.DataObject) -> None:
        if self.arrived:
            id = data.draw(st.sampled_from(sorted(self.arrived)))
            self.submit(id, self.arrived[id])

    def submit(self, id: str, commit: str) -> None:
        self.under_way.pop(id, None)
        self.arrived[id] = commit
        self.store.submit(self.spec(commit), delivery=Delivery(source="hub", id=id), payload={})

    def spec(self, commit: str | None) -> JobSpec:
        revisions = RevisionRange(repo="acme/faq", ref="refs/heads/main", new_sha=commit)
        return JobSpec(command=("train",), pipeline="faq", revisions=revisions)

    @rule(is_away=st.booleans())
    def the_hub_goes_or_comes(self, is_away: bool) -> None:
        self.is_away = is_away

    @rule()
    def delete_the_branch(self) -> None:
        self.is_deleted = True

    # People

    @rule()
    def run_by_hand(self) -> None:
        if self.history:
            with contextlib.suppress(PendingJob):
                self.store.submit(self.spec(None), by_hand=True)

    @rule()
    def roll_back(self) -> None:
        if len(self.served) > 1:
            self.served.pop()
            self.is_rolled_back = True

    @rule(call=st.sampled_from([JobStore.pause, JobStore.resume]))
    def pause_or_resume(self, call: Callable[[JobStore, str], bool]) -> None:
        call(self.store, "faq")

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        if jobs := self.store.list():
            self.store.cancel(data.draw(st.sampled_from(jobs)).id)

    # Machines

    @rule(number=RUNNERS)
    def step(self, number: int) -> None:
        runner = self.runners[number]
        runner._next_claim = 0.0
        runner._step(is_stopping=False)

    @rule(number=RUNNERS, result=st.sampled_from(RESULTS))
    def train(self, number: int, result: str) -> None:
        self.step(number)
        for machine, owner in self.running():
            self.end(machine, owner, result)
        self.step(number)

    @rule(number=RUNNERS)
    def take_over(self, number: int) -> None:
        self.clock.now += 11
        self.step(number)

    @rule(number=RUNNERS)
    def kill_runner(self, number: int) -> None:
        self.runners[number]._store.close()
        self.runners[number] = self.new_runner(number)

    @rule(number=RUNNERS, is_taken_over=st.booleans(), begins=st.booleans())
    def kill_runner_at_a_start(self, number: int, is_taken_over: bool, begins: bool) -> None:
        self.push(arrives=True)
        machine = self.machines[number]
        machine.kills_runner, machine.begins = True, begins
        with contextlib.suppress(Killed):
            self.step(number)
        machine.kills_runner, machine.begins = False, True
        self.kill_runner(number)
        if is_taken_over:
            self.take_over(1 - number)

    @rule(seconds=st.sampled_from([1.0, 6.0, 30.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule(data=st.data())
    def beat(self, data: st.DataObject) -> None:
        if running := self.running():
            number, owner = data.draw(st.sampled_from(running))
            job = self.machines[number].running[owner]
            try:
                self.store.heartbeat(job.id, owner, SETTINGS.lease_seconds)
            except LeaseLost:
                del self.machines[number].running[owner]

    @rule(data=st.data(), result=st.sampled_from(RESULTS))
    def end_process(self, data: st.DataObject, result: str) -> None:
        if running := self.running():
            self.end(*data.draw(st.sampled_from(running)), result)

    def running(self) -> list[tuple[int, str]]:
        """The agents that run: number of the machine, owner. Not sorted by the owners, which are
        random: hypothesis repeats a run only if the same draw is the same agent."""
        return [
            (number, owner)
            for number, machine in enumerate(self.machines)
            for owner in machine.running
        ]

    def has_valid_token(self, job: Job) -> bool:
        now = self.store.get(job.id)
        return now.state == "RUNNING" and now.attempt == job.attempt

    def end(self, number: int, owner: str, result: str) -> None:
        job = self.machines[number].running.pop(owner)
        assert job.spec.revisions is not None and job.spec.revisions.new_sha is not None
        head = job.spec.revisions.new_sha
        if result == "killed":
            return
        if result == "promoted" and self.has_valid_token(job):
            self.served.append(head)
            self.is_rolled_back = False
        facts = {"dataset_revision": head, "may_pass": result == "passes"}
        outcome = JobOutcome.model_validate(
            {**facts, "result": "failed" if result == "passes" else result}
        )
        with contextlib.suppress(LeaseLost):
            record_result(self.store, job, outcome, SETTINGS)

    @invariant()
    def at_most_one_process_has_a_valid_token(self) -> None:
        running = [self.machines[number].running[owner] for number, owner in self.running()]
        assert sum(map(self.has_valid_token, running)) <= 1

    @invariant()
    def at_most_one_runs_and_one_of_each_kind_is_pending(self) -> None:
        jobs = [(job.state, job.by_hand) for job in self.store.list() if not job.has_ended]
        assert sum(state == "RUNNING" for state, _ in jobs) <= 1
        pending = [job for job in jobs if job[0] == "SCHEDULING"]
        assert len(pending) == len(set(pending))

    @invariant()
    def every_delivery_that_arrived_has_a_job_that_is_found_by_its_commit(self) -> None:
        jobs = {job.id: job for job in self.store.list()}
        if self.checked == (jobs, self.arrived):
            return  # most moves change neither, and what follows takes most of the time
        self.checked = jobs, dict(self.arrived)
        of_commit = {
            commit: [job.id for job in self.store.of_commit(commit)]
            for commit in set(self.arrived.values())
        }
        for id, commit in self.arrived.items():
            answer = answer_to(self.store, "hub", id)
            assert answer is not None
            assert id in delivery_ids(jobs[answer["job"]])
            assert answer["job"] in of_commit[commit]

    def settle(self) -> None:
        """Everything comes back and nothing more happens."""
        self.is_away = self.is_deleted = False
        self.store.resume("faq")
        for id, commit in list(self.under_way.items()):
            self.submit(id, commit)
        told = answer_to(self.store, "hub", f"d{len(self.history)}")
        if told is None or self.store.get(told["job"]).state == "CANCELED":
            self.run_by_hand()  # the last delivery was lost, or its job was cancelled
        for _ in range(60):
            self.clock.now += 30
            for number in range(2):
                self.step(number)
            for number, owner in self.running():
                self.end(number, owner, "promoted")
            if not self.store.has_open_jobs():
                break
        assert not self.store.has_open_jobs()
        ended = [job for job in self.store.list() if job.ended_at is not None and job.attempt > 0]
        ended.sort(key=lambda job: (job.ended_at or 0, job.id))
        if not ended or not self.history:
            return
        head = self.history[-1]
        for job in (ended[-1], [job for job in ended if not repeats(job)][-1]):
            assert job.outcome is not None and job.spec.revisions is not None
            if job.outcome.result in ("failed", "cancelled"):
                return  # its outcome says so, and the delivery can be repeated
            assert job.spec.revisions.new_sha == job.outcome.dataset_revision == head
            if job.outcome.result == "promoted" and not self.is_rolled_back:
                assert self.served[-1] == head


def repeats(job: Job) -> bool:
    """Whether the job ended at once, because an earlier one had trained on the same head."""
    assert job.outcome is not None
    return (job.outcome.stage, job.outcome.result) == ("claim", "unchanged")


def check(urls: Iterator[str], num_examples: int) -> None:
    class Case(NewestCommit):
        def __init__(self) -> None:
            self.url = next(urls)
            super().__init__()

    run_state_machine_as_test(
        Case,
        settings=settings(
            max_examples=num_examples,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_on_sqlite() -> None:
    def urls() -> Iterator[str]:
        while True:
            with TemporaryDirectory() as folder:
                yield f"sqlite:///{Path(folder) / 'jobs.db'}"

    check(urls(), NUM_EXAMPLES)


def test_on_postgres(postgres_server: str) -> None:
    def urls() -> Iterator[str]:
        while True:
            yield new_schema(postgres_server)

    check(urls(), max(1, NUM_EXAMPLES // 8))
