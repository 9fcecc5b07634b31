"""`pipeline releases` against real release folders and a real server."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from typer.testing import CliRunner, Result

from jobs.outcome import JobOutcome
from jobs.spec import JobSpec, RevisionRange
from pipeline.by_hand import submit_bare
from pipeline.cli.main import app
from pipeline.errors import PipelineError
from pipeline.job_store import open_job_store
from pipeline.paths import Home
from pipeline.settings import load_settings
from pipeline.tokens import load_tokens
from serving.app import create_app
from serving.engines.echo_engine import EchoEngine
from serving.errors import ReleaseError
from serving.settings import ServingSettings
from serving.weights import releases
from serving.weights.release import RELEASE_FILE, Lineage
from serving.weights.verify import verify_release
from tests.receiver_payloads import dataset_update
from tests.serving_fixtures import echo_app, echo_release, running
from tests.stack_fixtures import free_ports

ROOT = Path(__file__).parents[2]
Configure = Callable[[int], Path]


@pytest.fixture
def configure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Configure:
    """Settings with a server port; the folder of the releases."""

    def write(port: int) -> Path:
        (tmp_path / "pipeline.toml").write_text(
            f'[[pipelines]]\nname = "answers"\ndataset = "me/facts"\nport = {port}\n'
        )
        pipeline_dir = Home.find().releases_dir / "answers"
        pipeline_dir.mkdir(parents=True, exist_ok=True)
        return pipeline_dir

    monkeypatch.setenv("PIPELINE_SETTINGS", str(tmp_path / "pipeline.toml"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PIPELINE_HOME", str(tmp_path / "home"))
    return write


def pipeline(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def test_a_swap_without_a_server_is_left_pending(configure: Configure) -> None:
    folder = configure(*free_ports(1))
    first, second = echo_release(folder, 1), echo_release(folder, 2)
    releases.set_current(folder, second.id)
    result = pipeline("releases", "rollback")
    assert result.exit_code == 0, result.output
    assert f"the next one to start will serve {first.id}" in result.output
    assert releases.pending_release(folder) == first.id


@pytest.mark.parametrize("token", ["own", "another"])
def test_the_marker_is_there_before_a_server_is_asked_and_gone_after(
    configure: Configure, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = configure(1)
    first = echo_release(folder, 1)
    seen = []
    set_pending = releases.set_pending

    def watch(pipeline_dir: Path, release_id: str) -> None:
        set_pending(pipeline_dir, release_id)
        seen.append(releases.pending_release(pipeline_dir))

    monkeypatch.setattr(releases, "set_pending", watch)
    server = create_app(
        engine=EchoEngine(),
        settings=ServingSettings(),
        releases_dir=folder,
        pipeline="answers",
        admin_token=load_tokens(Home.find().tokens_file).admin if token == "own" else "another",
    )
    with running(server) as url:
        configure(int(url.rpartition(":")[2]))
        result = pipeline("releases", "swap", first.id)
    assert seen == [first.id]
    assert releases.pending_release(folder) is None
    if token == "own":
        assert f"{first.id} is served" in result.output
    else:
        assert isinstance(result.exception, PipelineError)
        assert "not the server of this state folder" in str(result.exception)


def test_a_listing_in_a_narrow_pipe_cuts_nothing_and_tells_the_losses(
    configure: Configure, tmp_path: Path
) -> None:
    folder = configure(1)
    first, second = echo_release(folder, 1), echo_release(folder, 2)
    releases.set_current(folder, first.id)
    measured = {
        "new": {"rows": 0, "tokens": 0, "loss": None, "served_loss": None},
        "known": {"rows": 9, "tokens": 99, "loss": 0.25, "served_loss": 1.5},
    }
    manifest = second.model_copy(update={"evaluation": measured})
    (folder / second.id / RELEASE_FILE).write_text(manifest.model_dump_json())
    done = subprocess.run(
        [sys.executable, "-m", "pipeline", "releases", "ls"],
        env={**os.environ, "COLUMNS": "80"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    headings, newest, oldest = done.stdout.splitlines()
    assert "loss on new rows (before)  on known rows (before)" in headings
    assert newest.split()[:4] == [second.id, "-", "0.2500", "(1.5000)"]
    assert oldest.split()[:4] == [first.id, "served", "-", "-"]
    for release, line in ((first, oldest), (second, newest)):
        assert release.lineage.dataset_revision in line.split()
        assert release.lineage.job_id in line.split()


def test_jobs_are_listed_with_nothing_cut_and_cancelled_with_json(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure(1)
    monkeypatch.setenv("COLUMNS", "40")
    assert pipeline("jobs", "ls").output == "No job yet.\n"
    with open_job_store(load_settings(), Home.find()) as store:
        job = submit_bare(store, ("sleep", "1"))
    assert job.id in pipeline("jobs", "ls").output
    assert json.loads(pipeline("jobs", "inspect", "--latest", "--json").output)["id"] == job.id
    inspected = dict(
        line.split(maxsplit=1) for line in pipeline("jobs", "inspect", job.id).output.splitlines()
    )
    assert (inspected["state"], inspected["command"]) == ("SCHEDULING", "sleep 1")
    cancelled = json.loads(pipeline("jobs", "cancel", job.id, "--json").output)
    assert cancelled == {"job": job.id, "state": "CANCELED"}


def test_a_job_that_runs_is_asked_to_stop_and_one_that_was_rejected_says_so(
    configure: Configure,
) -> None:
    configure(1)
    with open_job_store(load_settings(), Home.find()) as store:
        job = submit_bare(store, ("sleep", "1"))
        assert store.claim("me", 60) is not None
        stopping = pipeline("jobs", "cancel", job.id).output
        assert stopping == f"{job.id} was asked to stop\n"
        outcome = JobOutcome(result="rejected", stage="evaluate", reason="worse by 9 %")
        store.finish(job.id, "me", outcome)
    shown = pipeline("jobs", "inspect", "--latest").output
    for line in ("state         COMPLETED", "outcome       rejected in evaluate", "worse by 9 %"):
        assert line in shown


def test_a_command_that_is_no_program_becomes_no_job(configure: Configure) -> None:
    configure(1)
    refused = pipeline("jobs", "run", "nosuchcommand")
    assert "no program 'nosuchcommand' on PATH" in str(refused.exception)
    assert pipeline("jobs", "ls").output == "No job yet.\n"


def test_rollback_goes_to_what_was_served_before_and_never_forth(configure: Configure) -> None:
    folder = configure(*free_ports(1))
    ids = [echo_release(folder, seed).id for seed in (1, 2, 3, 4)]
    releases.set_current(folder, ids[1])
    with running(with_own_token(folder)) as url:
        configure(int(url.rpartition(":")[2]))
        # A server that is still starting takes a swap's marker for its own.
        assert httpx.get(f"{url}/health").json()["release"] == ids[1]
        for command, served in (
            (("swap", ids[3]), ids[3]),
            (("rollback",), ids[1]),  # ids[2] was published, and never served
            (("rollback",), ids[0]),
        ):
            result = pipeline("releases", *command)
            assert result.output.startswith(f"{served} is served, instead of"), result.output
        again = pipeline("releases", "swap", ids[0])
        assert again.output == f"{ids[0]} is served already\n"


def test_rollback_knows_what_was_served_before_the_server_was_started_again(
    configure: Configure,
) -> None:
    folder = configure(*free_ports(1))
    ids = [echo_release(folder, seed).id for seed in (1, 2, 3)]
    for release in (ids[0], ids[2]):  # ids[1] was published, and never served
        releases.set_current(folder, release)
    assert releases.previous_release(folder) == ids[0]
    with running(with_own_token(folder)) as url:
        configure(int(url.rpartition(":")[2]))
        assert httpx.get(f"{url}/health").json()["release"] == ids[2]
        assert pipeline("releases", "rollback").output.startswith(f"{ids[0]} is served, instead")


def test_a_release_that_is_not_there_is_told_with_where_to_look(configure: Configure) -> None:
    configure(1)
    refused = pipeline("releases", "swap", "r000009-00000000")
    assert "no release r000009-00000000; `pipeline releases ls`" in str(refused.exception)


def test_a_trainer_of_ones_own_publishes_with_the_lineage_of_its_job(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = configure(1)
    served = echo_release(folder, 1)
    releases.set_current(folder, served.id)

    def published(*options: str) -> Lineage:
        answer = pipeline("releases", "publish", str(folder / served.id), *options, "--json")
        return releases.load_release(Path(json.loads(answer.output)["path"])).lineage

    assert published() == Lineage()
    by_hand = published("--parent", served.id, "--revision", "abc")
    assert by_hand == Lineage(parent=served.id, dataset_revision="abc")

    range = RevisionRange(
        repo="me/facts", ref="refs/heads/main", new_sha="f00", delivery_ids=("d",)
    )
    spec = JobSpec(command=("true",), pipeline="answers", revisions=range)
    (tmp_path / "spec.json").write_text(spec.model_dump_json())
    monkeypatch.setenv("JOB_ID", "j000007")
    monkeypatch.setenv("JOB_DIR", str(tmp_path))
    of_job = Lineage(
        parent=served.id,
        dataset="me/facts",
        dataset_ref="refs/heads/main",
        dataset_revision="f00",
        job_id="j000007",
        delivery_ids=("d",),
    )
    assert published() == of_job
    # A command on its own, started for an event: the payload tells.
    (tmp_path / "spec.json").write_text(JobSpec(command=("true",)).model_dump_json())
    payload = tmp_path / "payload.json"
    payload.write_text(json.dumps(dataset_update(name="me/facts")))
    monkeypatch.setenv("WEBHOOK_PAYLOAD_FILE", str(payload))
    assert published().dataset == "me/facts"
    assert published().dataset_revision is not None
    (tmp_path / "spec.json").unlink()
    refused = pipeline("releases", "publish", str(folder / served.id))
    assert "unset JOB_ID and JOB_DIR" in str(refused.exception)


def with_own_token(folder: Path) -> FastAPI:
    """The echo server, under the token of this state folder."""
    return create_app(
        engine=EchoEngine(),
        settings=ServingSettings(),
        releases_dir=folder,
        pipeline="answers",
        admin_token=load_tokens(Home.find().tokens_file).admin,
    )


def test_the_way_back_from_a_damaged_release(configure: Configure) -> None:
    folder = configure(*free_ports(1))
    first, second = echo_release(folder, 1), echo_release(folder, 2)
    releases.set_current(folder, second.id)
    (folder / second.id / RELEASE_FILE).write_text("{")
    with pytest.raises(ReleaseError, match=r"release\.json: Invalid JSON") as fault:
        releases.load_release(folder / second.id)
    assert ": :" not in str(fault.value)
    status = pipeline("status")
    assert status.exit_code == 0, status.output
    assert "unreadable: " in status.output and "Invalid JSON" in status.output
    result = pipeline("releases", "rollback")
    assert result.exit_code == 0, result.output
    assert releases.pending_release(folder) == first.id


def test_verify_prune_and_show_print_json(configure: Configure) -> None:
    folder = configure(1)
    ids = [echo_release(folder, seed).id for seed in (1, 2, 3)]
    assert json.loads(pipeline("releases", "show", ids[0], "--json").output)["id"] == ids[0]
    assert json.loads(pipeline("releases", "prune", "--keep", "2", "--json").output) == {
        "removed": ids[:1]
    }
    (folder / ids[2] / "tokenizer.json").unlink()
    result = pipeline("releases", "verify", "--json")
    assert result.exit_code == 1
    whole, damaged = json.loads(result.output)
    assert whole == {"id": ids[1], "faults": []}
    assert damaged["id"] == ids[2] and "tokenizer.json" in damaged["faults"][0]


def test_bin_shards_are_written_on_request(configure: Configure, tmp_path: Path) -> None:
    folder = configure(1)
    source = tmp_path / "elsewhere" / echo_release(tmp_path / "elsewhere", 1).id
    published = json.loads(
        pipeline("releases", "publish", str(source), "--format", "bin", "--json").output
    )
    release = releases.load_release(folder / published["id"])
    assert "pytorch_model.bin.index.json" in release.files
    assert verify_release(folder / release.id) == ()


def test_status_says_what_the_server_says_and_else_what_was_served_last(
    configure: Configure,
) -> None:
    folder = configure(*free_ports(1))
    first = echo_release(folder, 1)
    releases.set_current(folder, first.id)
    assert f"served last  {first.id}, which has seen" in pipeline("status").output
    with running(echo_app(folder)) as url:
        configure(int(url.rpartition(":")[2]))
        assert f"serves       {first.id}, which has seen" in pipeline("status").output
        (served,) = [each["served"] for each in status_as_json()["pipelines"]]
    assert served["is_live"] and served["dataset_revision"] == first.lineage.dataset_revision


def status_as_json() -> Any:
    return json.loads(pipeline("status", "--json").output)
