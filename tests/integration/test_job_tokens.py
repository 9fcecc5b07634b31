"""A job swaps releases of its own pipeline while it runs, by the token of its attempt."""

from pathlib import Path

import httpx

from jobs.job import attempt_token
from jobs.spec import JobSpec
from pipeline.cli.serve import _job_may_swap
from pipeline.paths import Home
from pipeline.runner.job_store import open_job_store
from pipeline.settings import Settings
from pipeline.tokens import load_tokens
from tests.jobs_fixtures import claim
from tests.serving_fixtures import echo_app, echo_release, running


def test_a_running_job_swaps_and_one_of_another_pipeline_does_not(tmp_path: Path) -> None:
    home, settings = Home(tmp_path / "home"), Settings()
    tokens = load_tokens(home.tokens_file)
    release = echo_release(tmp_path / "answers", 1)

    def swap(server: str, token: str) -> int:
        return httpx.post(
            f"{server}/admin/swap",
            json={"release": release.id},
            headers={"Authorization": f"Bearer {token}"},
        ).status_code

    app = echo_app(
        tmp_path / "answers",
        job_may_swap=lambda token: _job_may_swap(token, settings, home, tokens, "answers"),
    )
    with open_job_store(settings, home) as store, running(app) as server:
        held = {}
        for pipeline in ("answers", "other"):
            store.submit(JobSpec(command=("true",), pipeline=pipeline))
            job = claim(store, "runner")
            held[pipeline] = attempt_token(job, tokens.key.encode())
        assert swap(server, held["other"]) == 403
        assert swap(server, held["answers"]) == 200
        assert swap(server, tokens.admin) == 403, "this server has another admin token"
        store.close()
        home.jobs_database.write_bytes(b"no database" * 100)
        assert swap(server, held["answers"]) == 503, "the job asks again"
