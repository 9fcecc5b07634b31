"""A push job trains on the head of its ref: whatever became of its deliveries. On SQLite and on
Postgres."""

import pytest

from jobs.errors import HeadAway, NoHead
from jobs.job import FindHead, Head, Job, JobRequest, delivery_ids
from jobs.queue import HEAD_RETRY_SECONDS
from jobs.spec import RevisionRange
from jobs.store import JobStore
from tests.jobs_fixtures import DONE, FAILED, Clock, claim, delivery, spec


def at(sha: str) -> FindHead:
    return lambda job: Head(sha=sha, payload={"head": sha})


def train(store: JobStore, head: str, outcome: object = DONE) -> Job:
    """Claim the job that is due while the ref points to `head`, and end it if it has started."""
    job = store.claim("me", 60, at(head))
    assert job is not None
    return job if job.has_ended else store.finish(job.id, "me", outcome)  # type: ignore[arg-type]


def push(store: JobStore, commit: str, id: str, **values: object) -> Job:
    return store.submit(spec(commit, **values), payload={"of": commit}, delivery=delivery(id))


def commits(job: Job) -> tuple[str | None, str | None]:
    assert job.spec.revisions is not None
    return job.spec.revisions.old_sha, job.spec.revisions.new_sha


def test_the_head_the_range_and_the_payload_are_made_when_the_job_is_claimed(
    store: JobStore,
) -> None:
    push(store, "a", "d1")
    first = train(store, "b")
    assert (commits(first), first.payload) == ((None, "b"), {"head": "b"})
    push(store, "c", "d2")
    second = train(store, "c")
    assert commits(second) == ("b", "c")
    assert store.get(second.id) == second


def test_a_late_delivery_of_an_older_commit_trains_nothing(store: JobStore) -> None:
    push(store, "b", "d2")
    trained = train(store, "b")
    late = push(store, "a", "d1")
    assert late.id != trained.id
    ended = train(store, "b")
    assert ended.id == late.id and ended.outcome is not None
    assert (ended.state, ended.attempt, ended.outcome.result) == ("COMPLETED", 1, "unchanged")
    assert ended.outcome.reason == f"{trained.id} has trained on b already: promoted."
    assert ended.outcome.delivery_ids == ("d1",)


def test_a_force_push_there_and_back_trains_again(store: JobStore) -> None:
    for number, head in enumerate(("a", "b", "a")):
        push(store, head, f"d{number}")
        assert train(store, head).outcome == DONE


@pytest.mark.parametrize(
    ("last", "now"),
    [
        ({"settings": {"steps": 1}}, {"settings": {"steps": 2}}),
        ({"command": ("true",)}, {"command": ("false",)}),
    ],
)
def test_another_recipe_trains_the_same_head_again(
    store: JobStore, last: dict[str, object], now: dict[str, object]
) -> None:
    push(store, "a", "d1", **last)
    train(store, "a")
    push(store, "a", "d2", **now)
    assert train(store, "a").outcome == DONE


def test_a_head_that_failed_is_trained_again(store: JobStore) -> None:
    push(store, "a", "d1")
    train(store, "a", FAILED)
    push(store, "a", "d1")
    assert train(store, "a").outcome == DONE


def test_a_job_by_hand_is_never_left_out_and_trains_the_head_of_its_start(store: JobStore) -> None:
    push(store, "a", "d1")
    train(store, "a")
    main = RevisionRange(repo="acme/faq", ref="refs/heads/main")
    store.submit(spec(revisions=main), by_hand=True)
    ended = train(store, "a")
    assert (ended.outcome, commits(ended)) == (DONE, ("a", "a"))


def test_a_job_by_hand_for_a_commit_keeps_it(store: JobStore) -> None:
    store.submit(spec("x"), payload={"mine": 1}, by_hand=True)
    ended = train(store, "a")
    assert (commits(ended)[1], ended.payload) == ("x", {"mine": 1})


def test_a_delivery_that_arrives_while_the_head_is_read_is_not_lost(store: JobStore) -> None:
    push(store, "a", "d1", settings={"steps": 1})

    def slowly(job: Job) -> Head:
        push(store, "b", "d2", settings={"steps": 2})
        return Head(sha="a", payload={})

    first = store.claim("me", 60, slowly)
    assert first is not None and commits(first) == (None, "a")
    store.finish(first.id, "me", DONE)
    second = train(store, "b")
    assert (first.spec.settings, second.spec.settings) == ({"steps": 1}, {"steps": 2})
    assert (delivery_ids(first), delivery_ids(second)) == (("d1",), ("d2",))
    assert commits(second) == ("a", "b")


def test_deliveries_that_never_end_hold_up_a_job_only_until_its_longest_wait(
    store: JobStore, clock: Clock
) -> None:
    patient = {"debounce_seconds": 2.0, "max_wait_seconds": 5.0}
    ids = (f"d{number}" for number in range(2, 9))

    def slowly(job: Job) -> Head:
        push(store, "b", next(ids), **patient)
        return Head(sha="a", payload={})

    push(store, "a", "d1", **patient)
    for _ in range(2):
        clock.now += 2.0
        assert store.claim("me", 60, slowly) is None
    clock.now += 1.0
    job = store.claim("me", 60, slowly)
    assert job is not None and delivery_ids(job) == ("d1", "d2", "d3")


def test_a_head_that_cannot_be_read_is_read_again_after_a_pause(
    store: JobStore, clock: Clock
) -> None:
    def away(job: Job) -> Head:
        raise HeadAway("The hub does not answer.")

    waiting = push(store, "a", "d1")
    assert store.claim("me", 60, away) is None
    assert store.claim("me", 60, at("a")) is None
    shown = store.get(waiting.id)
    assert (shown.state, shown.waits_for) == ("SCHEDULING", "The hub does not answer.")
    assert store.seconds_to_next() == HEAD_RETRY_SECONDS
    clock.now += HEAD_RETRY_SECONDS
    job = store.claim("me", 60, at("a"))
    assert job is not None and job.waits_for is None


def test_a_ref_without_a_head_ends_the_job_with_the_reason(store: JobStore) -> None:
    def gone(job: Job) -> Head:
        raise NoHead("dataset acme/faq has no commit on main; push one")

    push(store, "a", "d1")
    ended = store.claim("me", 60, gone)
    assert ended is not None and ended.state == "ERROR" and ended.outcome is not None
    assert (ended.outcome.stage, ended.outcome.reason) == (
        "claim",
        "dataset acme/faq has no commit on main; push one",
    )
    push(store, "a", "d1")
    assert train(store, "a").outcome == DONE, "the delivery was repeated when there was one again"


def test_a_paused_pipeline_collects_deliveries(store: JobStore) -> None:
    assert store.pause("faq") and not store.pause("faq")
    store.submit_all(
        [
            JobRequest(spec=spec("a"), delivery=delivery("d1")),
            JobRequest(spec=spec("b"), delivery=delivery("d2")),
            JobRequest(spec=spec("x", pipeline="lore"), delivery=delivery("d3")),
        ]
    )
    assert list(store.paused()) == ["faq"]
    other = claim(store)
    assert other.spec.pipeline == "lore"
    store.finish(other.id, "me", DONE)
    assert store.claim("me", 60) is None and store.seconds_to_next() is None
    assert not store.has_open_jobs(), "a runner that ends when nothing is left does not wait"
    (waiting,) = store.list(pipeline="faq")
    assert waiting.waits_for == "faq is paused; to go on: pipeline resume faq"
    by_hand = store.submit(spec("x"), by_hand=True)
    assert train(store, "b").id == by_hand.id, "who asks for a job gets one"
    assert store.resume("faq") and not store.resume("faq")
    assert delivery_ids(train(store, "b")) == ("d1", "d2")
