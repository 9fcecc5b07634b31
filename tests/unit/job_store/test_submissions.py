"""What becomes of a delivery: a job, part of one, or nothing. On SQLite and on Postgres."""

import threading

from jobs.outcome import JobOutcome
from jobs.store import JobStore
from tests.jobs_fixtures import DONE, FAILED, Clock, answer_to, delivery, spec


def test_a_submission_is_a_pending_job_with_spec_and_payload(store: JobStore) -> None:
    submitted = store.submit(spec("b", "a", labels={"by": "hand"}), payload={"repo": {"é": 1}})
    assert submitted.is_new and submitted.how == "created"
    job = store.get(submitted.job.id)
    assert job == submitted.job
    assert (job.id, job.state, job.attempt) == ("j000001", "SCHEDULING", 0)
    assert job.payload == {"repo": {"é": 1}}
    assert job.spec.labels == {"by": "hand"}
    assert not job.has_ended


def test_a_delivery_is_answered_once(store: JobStore) -> None:
    assert answer_to(store, "hub", "d1") is None
    first = store.submit(spec("b", "a"), delivery=delivery("d1"))
    again = store.submit(spec("b", "a"), delivery=delivery("d1"))
    assert (again.job.id, again.is_new, again.how) == (first.job.id, False, "duplicate")
    assert answer_to(store, "hub", "d1") == {"job": first.job.id}
    assert answer_to(store, "another source", "d1") is None
    assert len(store.list()) == 1


def test_a_delivery_that_was_absorbed_answers_with_the_job_that_absorbed_it(
    store: JobStore,
) -> None:
    first = store.submit(spec("b", "a"), delivery=delivery("d1"))
    second = store.submit(spec("c", "b"), delivery=delivery("d2"))
    assert (second.job.id, second.how, second.is_new) == (first.job.id, "merged", False)
    assert answer_to(store, "hub", "d2") == {"job": first.job.id}
    # … and still does when that job has ended and another one is pending.
    job = store.claim("me", 60)
    assert job is not None
    store.finish(job.id, "me", DONE)
    store.submit(spec("d", "c"), delivery=delivery("d3"))
    assert store.submit(spec("c", "b"), delivery=delivery("d2")).job.id == first.job.id


def test_an_ignored_delivery_is_remembered_with_its_reason(store: JobStore) -> None:
    store.submit_all([], ignored=[(delivery("d1"), "A tag is not trained on.")])
    store.submit_all([], ignored=[(delivery("d1"), "another reason")])
    assert answer_to(store, "hub", "d1") == {"ignored": "A tag is not trained on."}
    assert store.list() == []


def test_an_ignored_delivery_can_be_replayed_into_a_job_but_not_back(store: JobStore) -> None:
    store.submit_all([], ignored=[(delivery("d1"), "No pipeline watches acme/faq.")])
    job = store.submit(spec("b"), delivery=delivery("d1")).job
    store.submit_all([], ignored=[(delivery("d1"), "No pipeline watches acme/faq.")])
    assert answer_to(store, "hub", "d1") == {"job": job.id}


def test_a_pending_job_absorbs_the_newer_commit(store: JobStore) -> None:
    store.submit(spec("b", "a", settings={"x": 1}), payload={"n": 1}, delivery=delivery("d1"))
    store.submit(spec("c", "b", settings={"x": 2}), payload={"n": 2}, delivery=delivery("d2"))
    (job,) = store.list()
    assert job.spec.revisions is not None
    assert (job.spec.revisions.old_sha, job.spec.revisions.new_sha) == ("a", "c")
    assert job.spec.revisions.delivery_ids == ("d1", "d2")
    assert job.spec.settings == {"x": 2}
    assert job.payload == {"n": 2}


def test_commits_that_arrive_in_the_wrong_order_keep_their_newest_end(store: JobStore) -> None:
    later = spec(new="c" * 40, old="b" * 40, settings={"of": "c"})
    earlier = spec(new="b" * 40, old="a" * 40, settings={"of": "b"})
    store.submit(later, payload={"of": "c"})
    job = store.submit(earlier, payload={"of": "b"}).job
    assert job.spec.revisions is not None
    assert (job.spec.revisions.old_sha, job.spec.revisions.new_sha) == ("a" * 40, "c" * 40)
    assert (job.spec.settings, job.payload) == ({"of": "c"}, {"of": "c"})


def test_what_arrives_behind_a_repeated_delivery_is_newer(store: JobStore) -> None:
    """Also if it ends where the repeated one begins: the branch was forced back."""
    store.cancel(store.submit(spec("b", "a"), delivery=delivery("d1")).job.id)
    store.cancel(store.submit(spec("c", "b"), delivery=delivery("d2")).job.id)
    repeated = store.submit(spec("b", "a"), delivery=delivery("d1"))
    assert repeated.how == "created"
    forced = store.submit(spec("a", "c"), delivery=delivery("d3"))
    assert (forced.how, forced.job.id) == ("merged", repeated.job.id)
    revisions = store.get(forced.job.id).spec.revisions
    assert revisions is not None and (revisions.old_sha, revisions.new_sha) == ("a", "a")


def test_the_deliveries_of_another_pipeline_are_no_repetitions(store: JobStore) -> None:
    """Two pipelines follow one dataset, and its deliveries overtake each other."""
    for pipeline in ("faq", "lore"):
        later = delivery("d2", f"retrain/{pipeline}")
        earlier = delivery("d1", f"retrain/{pipeline}")
        store.submit(spec("c" * 40, "b" * 40, pipeline=pipeline), delivery=later)
        job = store.submit(spec("b" * 40, "a" * 40, pipeline=pipeline), delivery=earlier).job
        assert job.spec.revisions is not None
        assert job.spec.revisions.new_sha == "c" * 40, pipeline


def test_a_command_that_failed_is_repeated_although_other_commands_came_later(
    store: JobStore,
) -> None:
    first = store.submit(spec(pipeline=None), delivery=delivery("d1", "webhook/one"))
    store.cancel(first.job.id)
    other = store.submit(spec(pipeline=None), delivery=delivery("d2", "webhook/two"))
    repeated = store.submit(spec(pipeline=None), delivery=delivery("d1", "webhook/one"))
    assert (repeated.how, repeated.job.id) == ("created", "j000003")
    again = store.submit(spec(pipeline=None), delivery=delivery("d1", "webhook/one"))
    assert (again.how, again.job.id) == ("duplicate", "j000003")
    assert other.job.id == "j000002"


def test_a_later_job_that_completed_before_its_cancel_answers_an_old_delivery(
    store: JobStore,
) -> None:
    store.submit(spec("b", "a"), delivery=delivery("d1"))
    failed = store.claim("me", 60)
    assert failed is not None
    store.finish(failed.id, "me", FAILED)
    later = store.submit(spec("c", "b"), delivery=delivery("d2")).job
    assert store.claim("me", 60) is not None
    store.cancel(later.id)
    assert store.finish(later.id, "me", DONE).state == "COMPLETED"
    repeated = store.submit(spec("b", "a"), delivery=delivery("d1"))
    assert (repeated.how, repeated.job.id) == ("duplicate", later.id)


def test_going_back_and_forth_ends_with_what_came_last(store: JobStore) -> None:
    store.submit(spec(new="b" * 40, old="a" * 40))
    job = store.submit(spec(new="a" * 40, old="b" * 40)).job
    assert job.spec.revisions is not None
    assert job.spec.revisions.new_sha == "a" * 40


def test_a_running_job_absorbs_nothing(store: JobStore) -> None:
    store.submit(spec("b", "a"))
    running = store.claim("me", 60)
    assert running is not None
    pending = store.submit(spec("c", "b")).job
    assert pending.id != running.id
    assert store.get(running.id).spec == running.spec
    assert store.claim("me", 60) is None, "one running job per pipeline"
    store.finish(running.id, "me", DONE)
    assert (claimed := store.claim("me", 60)) is not None and claimed.id == pending.id


def test_pipelines_and_plain_commands_do_not_wait_for_each_other(store: JobStore) -> None:
    for pipeline in ("faq", "lore", None, None):
        assert store.submit(spec(pipeline=pipeline)).is_new
    assert [job.id for _ in range(4) if (job := store.claim("me", 60))] == [
        f"j00000{n}" for n in (1, 2, 3, 4)
    ]


def test_debounce_waits_for_quiet_but_not_for_ever(store: JobStore, clock: Clock) -> None:
    patient = {"debounce_seconds": 2.0, "max_wait_seconds": 5.0}
    store.submit(spec("b", "a", **patient))
    assert store.claim("me", 60) is None
    assert store.seconds_to_next() == 2.0
    for n in range(3):
        clock.now += 1.5
        store.submit(spec(f"c{n}", "b", **patient))
        assert store.claim("me", 60) is None
    assert store.seconds_to_next() == 0.5, "five seconds after the first commit"
    clock.now += 0.5
    assert store.claim("me", 60) is not None
    assert store.seconds_to_next() is None


def test_a_dedupe_key_gives_the_latest_job_back(store: JobStore) -> None:
    first = store.submit(spec("b", "a", dedupe_key="main@b"), delivery=delivery("d1")).job
    again = store.submit(spec("b", "a", dedupe_key="main@b"), delivery=delivery("d2"))
    assert (again.how, again.job.id) == ("duplicate", first.id)
    assert answer_to(store, "hub", "d2") == {"job": first.id}
    running = store.claim("me", 60)
    assert running is not None and running.spec.revisions is not None
    assert running.spec.revisions.delivery_ids == ("d1", "d2")
    late = store.submit(spec("b", dedupe_key="main@b"), delivery=delivery("d3"))
    assert (late.how, late.job.id) == ("duplicate", first.id)
    assert store.get(first.id) == running, "what has begun names no more deliveries"
    store.finish(running.id, "me", DONE)
    assert store.submit(spec("b", dedupe_key="main@b")).job.id == first.id


def test_a_dedupe_key_of_a_failed_job_is_free_again(store: JobStore) -> None:
    first = store.submit(spec("b", dedupe_key="main@b")).job
    store.claim("me", 60)
    store.finish(first.id, "me", FAILED)
    assert store.submit(spec("b", dedupe_key="main@b")).is_new


def test_a_dedupe_key_of_a_cancelled_job_is_free_again(store: JobStore) -> None:
    """Whether it was cancelled before its start, or is still being stopped, or has stopped."""
    waiting = store.submit(spec("b", dedupe_key="main@b")).job
    store.cancel(waiting.id)
    again = store.submit(spec("b", dedupe_key="main@b"), delivery=delivery("forced"))
    assert again.is_new and again.job.state == "SCHEDULING"

    running = store.claim("me", 60)
    assert running is not None
    store.cancel(running.id)
    third = store.submit(spec("b", dedupe_key="main@b"))
    assert third.is_new
    assert store.submit(spec("b", dedupe_key="main@b")).job.id == third.job.id
    store.cancel(third.job.id)
    store.finish(running.id, "me", JobOutcome(result="cancelled"))
    assert store.submit(spec("b", dedupe_key="main@b")).is_new


def test_a_job_that_completed_before_it_was_stopped_has_done_its_work(store: JobStore) -> None:
    store.submit(spec("a", dedupe_key="k"))
    running = store.claim("me", 60)
    assert running is not None
    store.cancel(running.id)
    store.finish(running.id, "me", JobOutcome(result="promoted", release="r000001-a"))
    again = store.submit(spec("a", dedupe_key="k"))
    assert (again.how, again.job.id) == ("duplicate", running.id)


def test_a_force_push_there_and_back_trains_again(store: JobStore) -> None:
    for sha in ("a", "b", "a"):
        assert store.submit(spec(sha, dedupe_key=f"main@{sha}")).is_new
        job = store.claim("me", 60)
        assert job is not None
        store.finish(job.id, "me", DONE)


def test_the_key_of_a_pending_job_is_that_of_its_newest_commit(store: JobStore) -> None:
    store.submit(spec("a", dedupe_key="main@a"))
    store.submit(spec("b", dedupe_key="main@b"))
    assert store.submit(spec("b", dedupe_key="main@b")).how == "duplicate"
    assert store.submit(spec("a", dedupe_key="main@a")).how == "merged"
    (job,) = store.list()
    assert job.spec.revisions is not None and job.spec.revisions.new_sha == "a"


def test_a_plain_command_has_its_dedupe_key_to_itself(store: JobStore) -> None:
    first = store.submit(spec(pipeline=None, dedupe_key="k")).job
    assert store.submit(spec(pipeline=None, dedupe_key="other")).is_new
    assert store.submit(spec(pipeline=None, dedupe_key="k")).job.id == first.id


def test_a_delivery_is_named_once_however_often_it_comes(store: JobStore) -> None:
    store.submit(spec("b", "a"), delivery=delivery("d2", "one"))
    store.submit(spec("c", "b"), delivery=delivery("d1", "one"))
    store.submit(spec("c", "b"), delivery=delivery("d2", "other"))
    store.submit(spec("c", "b"), delivery=delivery("d1", "one"))
    (job,) = store.list()
    assert job.spec.revisions is not None
    assert job.spec.revisions.delivery_ids == ("d2", "d1")


def test_a_burst_from_many_threads_is_one_pending_job(store: JobStore) -> None:
    def push(thread: int) -> None:
        for n in range(10):
            store.submit(spec(f"{thread}.{n}", "x"), delivery=delivery(f"{thread}.{n}"))

    threads = [threading.Thread(target=push, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (job,) = store.list()
    assert job.spec.revisions is not None
    assert len(set(job.spec.revisions.delivery_ids)) == 40
