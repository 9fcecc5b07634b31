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
from transformers import AutoModelForCausalLM, MambaConfig
from typer.testing import CliRunner, Result

from jobs.outcome import JobOutcome
from jobs.spec import JobSpec, RevisionRange
from pipeline.cli.main import app
from pipeline.errors import PipelineError
from pipeline.paths import Home
from pipeline.runner.job_store import open_job_store
from pipeline.settings import load_settings
from pipeline.tokens import load_tokens
from serving.app import create_app
from serving.errors import ReleaseError
from serving.settings import ServingSettings
from serving.weights import release_store
from serving.weights.release import RELEASE_FILE, Lineage
from tests.echo_engine import EchoEngine
from tests.ports import free_ports
from tests.receiver_payloads import dataset_update
from tests.serving_fixtures import echo_app, echo_release, running
from tests.swap_fixtures import lose_a_shard

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


def test_a_swap_that_another_server_refuses_leaves_the_earlier_release_pending(
    configure: Configure,
) -> None:
    folder = configure(1)
    first, second = echo_release(folder, 1), echo_release(folder, 2)
    release_store.set_pending(folder, first.id)
    with running(echo_app(folder.with_name("elsewhere"))) as url:  # it has another token
        configure(int(url.rpartition(":")[2]))
        result = pipeline("releases", "swap", second.id)
    assert isinstance(result.exception, PipelineError)
    assert "is not the server of this state folder" in str(result.exception)
    assert release_store.pending_release(folder) == first.id


def test_a_swap_in_a_job_is_about_the_pipeline_of_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in a command on its own, whose spec names no pipeline: the environment does."""
    monkeypatch.setenv("PIPELINE_SETTINGS", str(tmp_path / "pipeline.toml"))
    monkeypatch.setenv("PIPELINE_HOME", str(tmp_path / "home"))
    ports = free_ports(2)
    (tmp_path / "pipeline.toml").write_text(
        "".join(
            f'[[pipelines]]\nname = "{name}"\ndataset = "me/{name}"\nport = {port}\n'
            for name, port in zip(("answers", "poems"), ports, strict=True)
        )
    )
    folder = Home.find().releases_dir / "poems"
    folder.mkdir(parents=True)
    release = echo_release(folder, 1)
    assert "add --pipeline" in str(pipeline("releases", "swap", release.id).exception)
    (tmp_path / "spec.json").write_text(JobSpec(command=("true",)).model_dump_json())
    monkeypatch.setenv("JOB_ID", "j000001")
    monkeypatch.setenv("JOB_DIR", str(tmp_path))
    monkeypatch.setenv("PIPELINE_NAME", "poems")
    assert release.id in pipeline("releases", "swap", release.id).output


def test_a_listing_in_a_narrow_pipe_cuts_nothing_and_tells_the_rows(
    configure: Configure, tmp_path: Path
) -> None:
    folder = configure(1)
    first, second = echo_release(folder, 1), echo_release(folder, 2)
    release_store.set_current(folder, first.id)
    measured = {"counts": {"changed": 1, "learned": 1, "known": 9, "kept": 9}}
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
    assert headings.split()[:2] == ["release", "rows"]
    assert newest.split()[:6] == [second.id, "learned", "1", "of", "1", "·"]
    assert "kept 9 of 9" in newest
    assert oldest.split()[:3] == [first.id, "served", "-"]
    for release, line in ((first, oldest), (second, newest)):
        assert release.lineage.dataset_revision in line.split()
        assert release.lineage.job_id in line.split()


def test_show_prints_the_counts_as_a_line_and_in_the_json(configure: Configure) -> None:
    folder = configure(1)
    release = echo_release(folder, 1)
    assert pipeline("releases", "show", release.id).stderr == "", "it was never evaluated"
    counts = {"changed": 60, "learned": 58, "learned_before": 3, "known": 9, "kept": 9}
    manifest = release.model_copy(update={"evaluation": {"counts": counts}})
    (folder / release.id / RELEASE_FILE).write_text(manifest.model_dump_json())
    shown = pipeline("releases", "show", release.id)
    assert shown.stderr == "learned 58 of 60 (3 before) · kept 9 of 9\n"
    assert json.loads(shown.stdout)["evaluation"]["counts"] == counts
    as_json = pipeline("releases", "show", release.id, "--json")
    assert (as_json.stdout, as_json.stderr) == (shown.stdout, "")


def test_a_refused_commit_that_waits_is_told_with_the_ways_on(configure: Configure) -> None:
    folder = configure(1)
    echo_release(folder, 1)
    with open_job_store(load_settings(), Home.find()) as store:
        job = store.submit(JobSpec(command=("true",), pipeline="answers"))
        assert store.claim("me", 60) is not None
        reason = "2 of 9 learned; not: '[INST] a :smile: [/INST]'; see [pipelines.data.columns]"
        outcome = JobOutcome(result="rejected", reason=reason, dataset_revision="c0ffee" * 6)
        store.finish(job.id, "me", outcome)
    (told,) = json.loads(pipeline("status", "--json").output)["pipelines"]
    advice = told["refused"]
    assert advice in pipeline("status").output and reason in pipeline("status").output
    assert "the gate rejected c0ffeec0ffee" in advice
    assert "pipeline jobs run --force --reason WHY" in advice


def test_rollback_goes_to_what_was_served_before_and_never_forth(configure: Configure) -> None:
    folder = configure(*free_ports(1))
    ids = [echo_release(folder, seed).id for seed in (1, 2, 3, 4)]
    release_store.set_current(folder, ids[1])
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
        assert again.stdout == f"{ids[0]} is already served\n"


def test_a_release_that_is_not_there_is_told_with_where_to_look(configure: Configure) -> None:
    configure(1)
    refused = pipeline("releases", "swap", "r000009-00000000")
    assert "no release r000009-00000000; `pipeline releases ls`" in str(refused.exception)


def test_a_trainer_of_ones_own_publishes_with_the_lineage_of_its_job(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = configure(1)
    served = echo_release(folder, 1)
    release_store.set_current(folder, served.id)

    def published(*options: str) -> Lineage:
        answer = pipeline("releases", "publish", str(folder / served.id), *options, "--json")
        return release_store.load_release(Path(json.loads(answer.output)["path"])).lineage

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
    of_event = published()
    assert (of_event.dataset, of_event.dataset_ref) == ("me/facts", "refs/heads/main")
    assert of_event.dataset_revision is not None
    (tmp_path / "spec.json").unlink()
    refused = pipeline("releases", "publish", str(folder / served.id))
    assert "unset JOB_ID and JOB_DIR" in str(refused.exception)


def test_what_the_torch_engine_cannot_serve_is_refused_when_it_is_published(
    configure: Configure, tmp_path: Path
) -> None:
    releases = configure(1)
    source = tmp_path / "checkpoint"
    config = MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, state_size=4)
    AutoModelForCausalLM.from_config(config).save_pretrained(source)

    def publish() -> Result:
        return pipeline("releases", "publish", str(source))

    with (tmp_path / "pipeline.toml").open("a") as settings:
        settings.write('[serving]\nengine = "torch"\n')
    assert "MambaForCausalLM keeps a state for each sequence" in str(publish().exception)
    assert not release_store.list_releases(releases)
    # Another engine may serve it.
    configure(1)
    with (tmp_path / "pipeline.toml").open("a") as settings:
        settings.write('[serving]\nengine = "vllm"\n')
    assert publish().exit_code == 0


def with_own_token(folder: Path) -> FastAPI:
    """The echo server, under the token of this state folder."""
    return create_app(
        engine=EchoEngine(),
        settings=ServingSettings(),
        pipeline_dir=folder,
        pipeline="answers",
        admin_token=load_tokens(Home.find().tokens_file).admin,
    )


def test_without_a_server_the_way_back_from_a_damaged_release_is_left_pending(
    configure: Configure,
) -> None:
    folder = configure(*free_ports(1))
    first, second = echo_release(folder, 1), echo_release(folder, 2)
    release_store.set_current(folder, second.id)
    (folder / second.id / RELEASE_FILE).write_text("{")
    with pytest.raises(ReleaseError, match=r"release\.json: Invalid JSON") as fault:
        release_store.load_release(folder / second.id)
    assert ": :" not in str(fault.value)
    status = pipeline("status")
    assert status.exit_code == 0, status.output
    assert "unreadable: " in status.output and "Invalid JSON" in status.output
    result = pipeline("releases", "rollback")
    assert result.exit_code == 0, result.output
    assert f"the next server that starts will serve {first.id}" in result.output
    assert release_store.pending_release(folder) == first.id


def test_verify_prints_json(configure: Configure) -> None:
    folder = configure(1)
    ids = [echo_release(folder, seed).id for seed in (1, 2, 3)]
    assert pipeline("releases", "prune", "--keep", "2").stdout == f"removed {ids[0]}\n"
    (folder / ids[2] / "tokenizer.json").unlink()
    result = pipeline("releases", "verify", "--json")
    assert result.exit_code == 1
    whole, damaged = json.loads(result.output)
    assert whole == {"id": ids[1], "faults": []}
    assert damaged["id"] == ids[2] and "tokenizer.json" in damaged["faults"][0]


def test_status_says_what_the_server_says_and_else_what_was_served_last(
    configure: Configure,
) -> None:
    folder = configure(*free_ports(1))
    first = echo_release(folder, 1)
    release_store.set_current(folder, first.id)
    assert f"served last  {first.id}, trained on" in pipeline("status").output
    with running(echo_app(folder)) as url:
        configure(int(url.rpartition(":")[2]))
        assert f"serves       {first.id}, trained on" in pipeline("status").output
        (served,) = [each["served"] for each in status_as_json()["pipelines"]]
    assert served["is_live"] and served["dataset_revision"] == first.lineage.dataset_revision


def status_as_json() -> Any:
    return json.loads(pipeline("status", "--json").output)


def test_status_and_doctor_say_what_stands_in_for_what(configure: Configure) -> None:
    folder = configure(*free_ports(1))
    before, damaged = (echo_release(folder, seed).id for seed in (1, 2))
    for release in (before, damaged):
        release_store.set_current(folder, release)
    lose_a_shard(folder / damaged)

    def told() -> str:
        return pipeline("status").output.replace("\n", " ")

    with running(with_own_token(folder)) as url:
        configure(int(url.rpartition(":")[2]))
        assert f"{damaged} cannot be served: " in told()
        assert f"; {before} is served as a substitute" in told()
        (served,) = [each["served"] for each in status_as_json()["pipelines"]]
        assert (served["release"], served["stands_in_for"]) == (before, damaged)
    # Without a server, the disk tells.
    assert f"{damaged} could not be served; {before} is served as a substitute" in told()
    found = json.loads(pipeline("doctor", "--json").output)
    messages = {each["message"]: each["next_step"] for each in found}
    (advice,) = [step for said, step in messages.items() if f"substitute for {damaged}" in said]
    assert "pipeline jobs run" in advice
    (advice,) = [step for said, step in messages.items() if f"{damaged} is damaged" in said]
    assert f"pipeline releases rm {damaged}" in advice

    lose_a_shard(folder / before)
    with running(with_own_token(folder)) as url:
        configure(int(url.rpartition(":")[2]))
        assert "pipeline releases rollback" in told() and "safetensors: missing" in told()


def test_rm_removes_a_release_but_none_that_is_in_use(configure: Configure) -> None:
    folder = configure(*free_ports(1))
    served, spare, named = (echo_release(folder, seed).id for seed in (1, 2, 3))
    release_store.set_current(folder, served)
    lose_a_shard(folder / spare)
    assert pipeline("releases", "rm", spare).stdout == f"removed {spare}\n"
    for release, why in ((served, "because it is served"), (spare, "is not a release")):
        refused = pipeline("releases", "rm", release)
        assert refused.exit_code == 1 and why in str(refused.exception)
    # What a server was started with is not in `current`.
    with running(echo_app(folder, folder=folder / named)) as url:
        configure(int(url.rpartition(":")[2]))
        assert "because it is served" in str(pipeline("releases", "rm", named).exception)
    assert release_store.release_ids(folder) == [served, named]
