"""The runner from submission to outcome, with real processes."""

import json
import threading
from pathlib import Path

import pytest
from sqlalchemy import create_engine, delete, text

from jobs.folder import LOG, read_log
from jobs.runner import Runner
from jobs.schema import JOBS, number_of
from jobs.spec import JobSpec
from tests.job_runner_fixtures import ENVIRONMENT, SETTINGS, House, house, program
from tests.jobs_fixtures import is_gone, pids_in, until

__all__ = ["house"]

PAYLOAD = {
    "repo": {"type": "dataset", "name": "acme/faq"},
    "webhook": {"id": "w1", "version": 3},
}


def test_a_job_runs_from_submission_to_outcome(house: House) -> None:
    house.run(SETTINGS.model_copy(update={"num_threads": 3}), HF_TOKEN="t0ken")
    spec = program(
        "show_environment",
        env={"COLOUR": "blue"},
        settings={"lr": 0.1},
    )
    job = house.store.submit(spec, payload=PAYLOAD)
    ended = house.ended(job)
    assert (ended.state, ended.outcome, ended.attempt) == ("COMPLETED", None, 1)
    folder = house.jobs_dir / job.id
    assert JobSpec.model_validate_json((folder / "spec.json").read_text()) == spec
    shown = json.loads(house.log(job).read_text())
    assert json.loads(Path(shown["WEBHOOK_PAYLOAD_FILE"]).read_text()) == PAYLOAD
    expected = {
        "WEBHOOK_PAYLOAD": json.dumps(PAYLOAD),
        "WEBHOOK_REPO_ID": "acme/faq",
        "WEBHOOK_REPO_TYPE": "dataset",
        "WEBHOOK_ID": "w1",
        "JOB_ID": job.id,
        "JOB_DIR": str(folder),
        "HF_TOKEN": "t0ken",
        "COLOUR": "blue",
        "OMP_NUM_THREADS": "3",
    }
    assert expected.items() <= shown.items()
    files = [path for path in folder.rglob("*") if path.name != LOG]
    assert not any("t0ken" in path.read_text() for path in files), "a secret is on disk"


def test_the_folder_of_a_lost_database_is_not_believed(house: House) -> None:
    spec = program("write_outcome", "published", "0")
    old = house.jobs_dir / "j000001"
    old.mkdir(parents=True)
    (old / "spec.json").write_text(spec.model_dump_json())
    (old / "job.json").write_text('{"id": "j000001", "created_at": 1.0}')
    (old / "outcome.json").write_text('{"result": "promoted"}')
    (old / "log.txt").write_text("what the old job said")
    job = house.store.submit(spec)
    assert job.id == old.name
    assert read_log(old, job.identity, 0) == b""
    house.run()
    outcome = house.ended(job).outcome
    assert outcome is not None and outcome.result == "published"
    assert "what the old job said" not in house.log(job).read_text()


def test_a_job_may_empty_its_working_folder(house: House) -> None:
    house.run()
    script = "rm -rf ./*; sleep 0.5; exit 3"
    job = house.store.submit(JobSpec(command=("sh", "-c", script), pipeline="faq"))
    ended = house.ended(job)
    assert ended.attempt == 1
    assert ended.outcome is not None and ended.outcome.exit_code == 3


def test_the_outcome_that_a_job_wrote_is_final(house: House) -> None:
    house.run()
    job = house.ended(house.store.submit(program("write_outcome", "promoted", "9")))
    assert job.state == "COMPLETED" and job.outcome is not None
    assert job.outcome.release == "r000001-1f3ac9d2"


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("mkdir outcome.json", "outcome.json"),
        ("rm job.json; mkdir job.json; kill -9 $PPID; sleep 9", "job.json"),
        ("rm log.txt; mkdir log.txt; exit 3", "exited with 3"),
    ],
)
def test_an_odd_file_in_the_folder_of_one_job_fails_this_job_alone(
    house: House, script: str, reason: str
) -> None:
    _, _, runner = house.run()
    odd = house.store.submit(JobSpec(command=("sh", "-c", script)))
    other = house.store.submit(JobSpec(command=("sleep", "0.5")))
    job = house.ended(odd)
    assert job.state == "ERROR" and job.outcome is not None
    assert reason in str(job.outcome.reason)
    assert house.ended(other).state == "COMPLETED"
    assert runner.is_alive()


def test_a_killed_job_goes_on_from_what_it_wrote(house: House) -> None:
    house.run()
    job = house.ended(house.store.submit(program("die_once")))
    assert (job.state, job.attempt, job.num_lost) == ("COMPLETED", 2, 1)
    assert house.log(job).read_text() == "second attempt\n"


def test_a_cancel_that_came_too_late_changes_nothing(house: House) -> None:
    house.run()
    job = house.store.submit(program("stop_politely", "promoted"))
    pids_in(house.log(job))
    house.store.cancel(job.id)
    assert house.ended(job).state == "COMPLETED"


def test_a_job_that_takes_too_long_is_stopped(house: House) -> None:
    house.run(SETTINGS.model_copy(update={"timeout_seconds": 1.5}))
    job = house.store.submit(program("have_children"))
    pids = pids_in(house.log(job), 3)
    job = house.ended(job)
    assert job.state == "ERROR" and job.outcome is not None and job.outcome.reason is not None
    assert job.outcome.stage == "timeout" and "1.5 s" in job.outcome.reason
    assert all(is_gone(pid) for pid in pids)


def test_a_runner_waits_for_a_store_that_fails_and_comes_back(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    house.run()
    assert house.ended(house.store.submit(JobSpec(command=("true",)))).state == "COMPLETED"
    engine = create_engine(house.url)
    with engine.begin() as connection:
        connection.execute(text("ALTER TABLE jobs RENAME TO elsewhere"))
    until(lambda: "Trying again" in caplog.text)
    with engine.begin() as connection:
        connection.execute(text("ALTER TABLE elsewhere RENAME TO jobs"))
    engine.dispose()
    assert house.ended(house.store.submit(JobSpec(command=("true",)))).state == "COMPLETED"


def test_a_running_job_that_the_store_has_lost_is_killed_and_other_jobs_go_on(house: House) -> None:
    house.run()
    lost = house.store.submit(program("sleep_until_stopped"))
    (pid,) = pids_in(house.log(lost))
    engine = create_engine(house.url)
    with engine.begin() as connection:
        connection.execute(delete(JOBS).where(JOBS.c.number == number_of(lost.id)))
    engine.dispose()
    until(lambda: is_gone(pid))
    job = house.store.submit(program("write_outcome", "promoted", "0"))
    assert house.ended(job).state == "COMPLETED"


def test_a_module_that_cannot_be_imported_in_advance_is_done_without(house: House) -> None:
    house.run_process("tests.jobs_broken_module", "no_such_module", "json")
    job = house.store.submit(program("write_outcome", "promoted", "0"))
    assert house.ended(job).state == "COMPLETED"


@pytest.mark.slow
def test_a_fork_of_a_server_with_torch_uses_many_threads(house: House) -> None:
    house.run_process("torch")
    job = house.store.submit(program("use_torch", "2"))
    assert house.ended(job).state == "COMPLETED"
    assert house.log(job).read_text() == f"sum {512**3} preloaded True\n"


def test_run_until_idle_waits_for_who_is_due_later_and_for_the_lease_of_a_dead_runner(
    house: House,
) -> None:
    house.store.submit(program("write_outcome", "promoted", "0"))
    house.store.claim("dead", 0.5)
    house.store.submit(program("write_outcome", "unchanged", "0"))
    house.store.submit(JobSpec(command=("true",), debounce_seconds=0.2))
    runner = Runner(house.store, house.jobs_dir, SETTINGS, ENVIRONMENT)
    runner.run(threading.Event(), until_idle=True)
    assert [job.state for job in house.store.list()] == ["COMPLETED"] * 3
