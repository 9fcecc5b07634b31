"""A dataset outside the hub: a push that GitHub would tell of becomes the model that answers."""

import json

import httpx
import pytest

from tests.hub_fixtures import git_env, run_git
from tests.receiver_payloads import GITHUB_PUSH, GITLAB_PUSH, ZEROS, body_of, hmac_hex
from tests.stack_fixtures import Workplace, configure, facts, stack_up, workplace

__all__ = ["workplace"]


@pytest.mark.slow
def test_a_push_to_a_repository_elsewhere_is_served(workplace: Workplace) -> None:
    env = git_env("http://127.0.0.1", "unused")
    run_git("init", "-q", "--bare", "remote.git", cwd=workplace.folder, env=env)
    url = f"file://{workplace.folder}/remote.git"
    run_git("clone", "-q", url, "clone", cwd=workplace.folder, env=env)
    clone = workplace.folder / "clone"
    (clone / "facts.jsonl").write_text(facts(0, 80))
    run_git("add", "-A", cwd=clone, env=env)
    run_git("commit", "-qm", "Rows", cwd=clone, env=env)
    run_git("push", "-q", "origin", "HEAD:main", cwd=clone, env=env)
    sha = run_git("rev-parse", "HEAD", cwd=clone, env=env)

    configure(workplace)
    settings = workplace.folder / "pipeline.toml"
    settings.write_text(settings.read_text().replace('"local/facts"', json.dumps(url)))
    repository = {**GITHUB_PUSH["repository"], "clone_url": url}
    body = body_of({**GITHUB_PUSH, "before": ZEROS, "after": sha, "repository": repository})
    with stack_up(workplace):
        secret = json.loads((workplace.home / "tokens.json").read_text())["webhook"]
        retrain = f"{workplace.url('receiver')}/webhooks/retrain"
        headers = {"X-GitHub-Event": "push", "X-GitHub-Delivery": "d1"}
        proof = {"X-Hub-Signature-256": f"sha256={hmac_hex(secret, body)}"}
        for path, given, status in (
            ("/github", {}, 401),
            ("/github", {"X-Webhook-Secret": secret}, 401),
            ("/gitlab", proof, 401),
            ("", proof, 401),
            ("/github", {"X-Hub-Signature-256": "sha256=00"}, 403),
        ):
            answer = httpx.post(retrain + path, content=body, headers=headers | given)
            assert answer.status_code == status, (path, given)
        answer = httpx.post(f"{retrain}/github", content=body, headers=headers | proof)
        assert answer.status_code == 200, answer.text
        job = workplace.wait_for_job(sha)
        assert (job["id"], job["outcome"]["result"]) == (answer.json()["job"], "promoted"), job
        completion = httpx.post(
            f"{workplace.url('serving')}/v1/completions",
            json={"model": "facts", "prompt": "Shelf 3 holds", "max_tokens": 4},
            timeout=60,
        )
        assert completion.headers["X-Dataset-Revision"] == sha
        assert json.loads(workplace.run("status", "--json"))["pipelines"][0]["dataset"] == url

        again = httpx.post(f"{retrain}/github", content=body, headers=headers | proof)
        assert again.json() == answer.json(), "a delivery that comes twice gets the first answer"

        (clone / "facts.jsonl").write_text(facts(0, 80) + facts(80, 90))
        run_git("commit", "-qam", "More rows", cwd=clone, env=env)
        run_git("push", "-q", "origin", "HEAD:main", cwd=clone, env=env)
        newer = run_git("rev-parse", "HEAD", cwd=clone, env=env)
        project = {**GITLAB_PUSH["project"], "git_http_url": url, "default_branch": "main"}
        push = {"before": sha, "after": newer, "ref": "refs/heads/main", "project": project}
        answer = httpx.post(
            f"{retrain}/gitlab",
            content=body_of({**GITLAB_PUSH, **push}),
            headers={
                "X-Gitlab-Event": "Push Hook",
                "X-Gitlab-Event-UUID": "g1",
                "X-Gitlab-Token": secret,
            },
        )
        assert answer.status_code == 200, answer.text
        job = workplace.wait_for_job(newer)
        assert (job["id"], job["outcome"]["result"]) == (answer.json()["job"], "promoted"), job
        assert job["spec"]["revisions"]["old_sha"] == sha
