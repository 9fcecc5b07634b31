"""The stack as a user meets it: pushes, completions, jobs by hand, rollback, faults."""

import json
from collections.abc import Iterator

import httpx
import pytest

from tests.jobs_fixtures import new_database, postgres_server
from tests.stack_fixtures import (
    Checkout,
    Workplace,
    clone,
    configure,
    facts,
    findings,
    stack_up,
    workplace,
    workplace_in,
)

__all__ = ["postgres_server", "workplace"]


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Workplace, Checkout]]:
    """A stack with one release, shared by the tests of this module that leave it whole."""
    workplace = workplace_in(tmp_path_factory.mktemp("loop"))
    configure(workplace)
    with stack_up(workplace):
        checkout = clone(workplace)
        job = workplace.wait_for_job(checkout.push({"facts.jsonl": facts(0, 80)}))
        assert job["outcome"]["result"] == "promoted", job["outcome"]
        yield workplace, checkout


def served(workplace: Workplace) -> str:
    answer = httpx.post(
        f"{workplace.url('serving')}/v1/completions",
        json={"model": "facts", "prompt": "Shelf 3 holds", "max_tokens": 4, "temperature": 0},
        timeout=60,
    )
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert answer.headers["X-Model-Release"] == body["system_fingerprint"]
    return str(body["system_fingerprint"])


@pytest.mark.slow
def test_the_loop_with_its_jobs_on_postgres(workplace: Workplace, postgres_server: str) -> None:
    configure(workplace)
    with new_database(postgres_server) as url:
        settings = workplace.folder / "pipeline.toml"
        settings.write_text(f'[jobs]\ndatabase_url = "{url}"\n\n{settings.read_text()}')
        with stack_up(workplace):
            checkout = clone(workplace)
            job = workplace.wait_for_job(checkout.push({"facts.jsonl": facts(0, 80)}))
            assert job["outcome"]["result"] == "promoted", job["outcome"]
            assert served(workplace) == job["outcome"]["release"]
            job = workplace.wait_for_job(checkout.push({"README.md": "# Shelves\n"}))
            assert job["outcome"]["result"] == "unchanged"
            assert findings(workplace, code=0) == {}
    assert not list(workplace.home.glob("jobs/*.sqlite*"))


def test_rollback_and_swap_choose_what_is_served(loop: tuple[Workplace, Checkout]) -> None:
    workplace, checkout = loop
    first = served(workplace)
    workplace.wait_for_job(checkout.push({"facts.jsonl": facts(0, 100)}))
    second = served(workplace)
    assert second != first
    workplace.run("releases", "rollback")
    assert served(workplace) == first
    assert [row["id"] for row in workplace.json("releases", "ls") if row["served"]] == [first]
    workplace.run("releases", "swap", second)
    assert served(workplace) == second


@pytest.mark.slow
def test_a_command_by_hand_has_a_jobs_environment(loop: tuple[Workplace, Checkout]) -> None:
    workplace, checkout = loop
    names = ("HF_ENDPOINT", "PIPELINE_SERVER_URL", "WEBHOOK_REPO_ID", "WEBHOOK_REPO_TYPE", "JOB_ID")
    script = "; ".join(f'echo "${name}"' for name in names) + '; cat "$WEBHOOK_PAYLOAD_FILE"'
    workplace.run("jobs", "run", "--", "sh", "-c", script)
    job = workplace.json("jobs", "ls")[0]
    *values, payload = workplace.run("jobs", "logs", job["id"]).splitlines()
    urls = [workplace.url("hub"), workplace.url("serving")]
    assert values == [*urls, "local/facts", "dataset", job["id"]]
    head = checkout.git("rev-parse", "HEAD").strip()
    assert json.loads(payload)["updatedRefs"][0]["newSha"] == head

    report = 'echo "$HF_TOKEN $PIPELINE_ADMIN_TOKEN secret:$WEBHOOK_SECRET"'
    hub_token, admin_token, secret = workplace.run("jobs", "run", "--", "sh", "-c", report).split()
    assert hub_token == admin_token and hub_token.startswith("hpj_")
    assert secret == "secret:", "no webhook triggered it"
    ended = {"Authorization": f"Bearer {hub_token}"}
    asked = httpx.get(f"{workplace.url('hub')}/api/datasets/local/facts", headers=ended)
    assert asked.status_code == 401
    swap = httpx.post(f"{workplace.url('serving')}/admin/swap", json={}, headers=ended)
    assert swap.status_code == 403

    workplace.run("jobs", "run", "--", "sh", "-c", "exit 7", code=7)
    assert workplace.json("jobs", "ls")[0]["outcome"]["exit_code"] == 7


def test_status_tells_what_runs_and_what_is_served(loop: tuple[Workplace, Checkout]) -> None:
    workplace, checkout = loop
    report = workplace.json("status")
    assert [service["state"] for service in report["services"]] == ["up"] * 4
    (pipeline,) = report["pipelines"]
    assert pipeline["served"]["release"] == served(workplace)
    assert pipeline["dataset_head"] == checkout.git("rev-parse", "HEAD").strip()
    text = workplace.run("status")
    for word in ("hub", "receiver", "runner", "serve", pipeline["served"]["release"]):
        assert word in text
