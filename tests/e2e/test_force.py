"""Past a refusing gate, with a reason that stays to be read."""

import json
import subprocess
import sys

import pytest

from tests.stack_fixtures import Workplace, clone, configure, facts, stack_up, workplace

__all__ = ["workplace"]

REASON = "the held-out rows are known to be wrong"


@pytest.mark.slow
def test_a_reason_leads_past_the_gate_and_stands_in_outcome_and_release(
    workplace: Workplace,
) -> None:
    configure(workplace, max_tokens=2_000)
    for alone in (("--force",), ("--reason", REASON)):
        done = subprocess.run(
            [sys.executable, "-m", "pipeline", "jobs", "run", *alone],
            env=workplace.env,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 1 and "must be used together" in done.stderr
    with stack_up(workplace):
        checkout = clone(workplace)
        first = workplace.wait_for_job(checkout.push({"facts.jsonl": facts(0, 60)}))
        assert first["outcome"]["result"] == "promoted"
        every_row_rewritten = {"facts.jsonl": facts(0, 60, answer="hat")}
        job = workplace.wait_for_job(checkout.push(every_row_rewritten))
        assert job["outcome"]["result"] == "rejected"

        said = workplace.run("jobs", "run", "--force", "--reason", REASON, "--json")
        outcome = json.loads(said)["outcome"]
        assert outcome["result"] == "promoted"
        for words in (REASON, "deleted or rewritten"):
            assert words in outcome["reason"]
        shown = workplace.json("releases", "show", outcome["release"])
        assert REASON in json.dumps(shown)
