"""The stack as a user meets it: pushes, completions, jobs by hand, rollback, faults."""

import httpx
import pytest

from tests.jobs_fixtures import new_database, postgres_server
from tests.stack_fixtures import (
    Workplace,
    clone,
    configure,
    facts,
    findings,
    stack_up,
    workplace,
)

__all__ = ["postgres_server", "workplace"]


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
    url = new_database(postgres_server)
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


def test_rollback_and_swap_choose_what_is_served(workplace: Workplace) -> None:
    configure(workplace)
    with stack_up(workplace):
        checkout = clone(workplace)
        workplace.wait_for_job(checkout.push({"facts.jsonl": facts(0, 80)}))
        first = served(workplace)
        workplace.wait_for_job(checkout.push({"facts.jsonl": facts(0, 100)}))
        second = served(workplace)
        assert second != first
        workplace.run("releases", "rollback")
        assert served(workplace) == first
        assert [row["id"] for row in workplace.json("releases", "ls") if row["served"]] == [first]
        workplace.run("releases", "swap", second)
        assert served(workplace) == second
