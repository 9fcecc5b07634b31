"""The token of an attempt is good while the attempt runs, and nothing else is."""

from jobs.job import attempt_token, job_of_token
from jobs.store import JobStore
from tests.jobs_fixtures import DONE, claim, lost, spec

KEY = b"a key of thirty-two bytes or more"


def test_the_token_of_a_running_attempt_names_its_job(store: JobStore) -> None:
    pending = store.submit(spec(pipeline="faq"))
    assert job_of_token(attempt_token(pending, KEY), store, KEY) is None, "it has not started"
    job = claim(store)
    token = attempt_token(job, KEY)
    found = job_of_token(token, store, KEY)
    assert found is not None and (found.id, found.spec.pipeline) == (job.id, "faq")
    store.finish(job.id, "me", DONE)
    assert job_of_token(token, store, KEY) is None, "it has ended"


def test_the_token_of_an_earlier_attempt_is_good_no_more(store: JobStore) -> None:
    store.submit(spec())
    job = claim(store)
    first = attempt_token(job, KEY)
    again = store.retry(job.id, "me", lost(job))
    assert again.attempt == job.attempt + 1
    assert job_of_token(first, store, KEY) is None
    assert job_of_token(attempt_token(again, KEY), store, KEY) is not None


def test_a_token_of_another_key_or_with_another_number_is_refused(store: JobStore) -> None:
    store.submit(spec())
    token = attempt_token(claim(store), KEY)
    assert job_of_token(token, store, b"the key of another installation!!") is None
    for forged in (
        token.replace("j000001", "j000002"),
        token.replace("_1_", "_2_"),
        token[:-1] + ("0" if token[-1] != "0" else "1"),
        token.removeprefix("hpj_"),
        token + "\n",
        token.replace("_1_", f"_{'1' * 5000}_"),
    ):
        assert job_of_token(forged, store, KEY) is None, forged
