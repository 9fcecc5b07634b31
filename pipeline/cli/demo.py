"""`pipeline demo`: pushes two commits to a dataset, and shows how each push changes the answers of
the model.

The demo starts a stack in a temporary folder, with the settings that `pipeline init` writes. The
demo pushes with `git` and sends its questions to the server over HTTP, as a user would. To show the
progress of the two jobs, the demo reads the job store and the jobs' `metrics.jsonl`.
"""

import contextlib
import io
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from pipeline.cli.up import up
from pipeline.errors import PipelineError
from pipeline.paths import Home

NAME = "facts"
DATASET = "demo/facts"


def demo(
    engine: Annotated[
        Literal["torch", "vllm"], typer.Option(help="The engine that computes the answers.")
    ] = "torch",
    keep: Annotated[bool, typer.Option(help="Keep the stack running after the demo.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object and nothing else.")
    ] = False,
) -> None:
    """Push two commits to a dataset, and show how the model's answers change."""
    from rich.console import Console

    console = Console(quiet=as_json, highlight=False)
    folder = Path(tempfile.mkdtemp(prefix="hotpush-demo-"))
    os.environ["PIPELINE_HOME"] = str(folder / ".pipeline")
    os.environ["PIPELINE_SETTINGS"] = str(folder / "pipeline.toml")
    os.environ["PIPELINE_SERVING__ENGINE"] = engine
    began = time.time()
    init = ("init", "--name", NAME, "--dataset", DATASET)
    _run([sys.executable, "-m", "pipeline", *init], cwd=folder)
    console.print("Starting hub, receiver, job runner and completion server …")
    # From here on, SIGTERM stops the services in the same way as Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            up(detach=True)
    except PipelineError:
        # If there is no log file of the hub, no service was started. The folder then contains
        # nothing that could explain the error, so remove it.
        if not Home.find().log_file("hub").exists():
            shutil.rmtree(folder)
        raise
    is_complete = False
    try:
        report = _Demo(folder / "facts", console).run()
        is_complete = True
    finally:
        if not (keep and is_complete):
            _run([sys.executable, "-m", "pipeline", "down"])
    report["seconds"]["total"] = round(time.time() - began, 2)
    if as_json:
        print(json.dumps(report))
    elif keep:
        console.print(_what_next(folder), markup=False, soft_wrap=True)
    else:
        console.print(
            f"\nEverything is stopped. The files of the demo are in {folder}", soft_wrap=True
        )
        console.print(
            "Next: `Five minutes on data of your own` in README.md; or run the demo again and keep "
            "its stack up: pipeline demo --keep",
            soft_wrap=True,
        )
    if not report["ok"]:
        raise typer.Exit(1)


@dataclass(frozen=True, kw_only=True)
class _Push:
    """The result of one `git push`."""

    release: str
    """The id of the release that the job of this push made."""
    moments: dict[str, float]
    """Step (such as `job started`) → the Unix time of the step."""


class _Demo:
    def __init__(self, checkout: Path, console: Any) -> None:
        from pipeline.cli.env import environment
        from pipeline.job_store import open_job_store
        from pipeline.settings import load_settings
        from pipeline.tokens import load_tokens

        settings = load_settings()
        self._home = Home.find()
        self._store = open_job_store(settings, self._home)
        self._remote = f"{settings.hub_url}/datasets/{DATASET}"
        self._server_url = settings.server_url(settings.pipeline(NAME))
        self._checkout = checkout
        self._console = console
        token = load_tokens(self._home.tokens_file).hub
        self._git_env = os.environ | environment(settings.hub_url, token)

    def run(self) -> dict[str, Any]:
        """Run the demo; returns the report that `--json` prints."""
        from pipeline.cli.demo_client import Client, ask
        from pipeline.cli.demo_facts import QUESTIONS, first_commit, second_commit

        say = self._console.print
        prompts = [prompt for prompt, _, _ in QUESTIONS]

        say(f"\n[bold]A first commit[/] to {self._remote}")
        self._clone()
        first = self._push("What is known so far", first_commit())
        before = [ask(self._server_url, NAME, prompt) for prompt in prompts]
        for (prompt, expected, _), reply in zip(QUESTIONS, before, strict=True):
            self._show(prompt, expected, reply)

        say(
            "\n[bold]A second commit[/] changes and adds facts. Meanwhile, a client keeps sending "
            "requests"
        )
        with Client(self._server_url, NAME, prompts) as client:
            second = self._push("Some facts changed, some are new", second_commit())
            client.wait_for(second.release)
        second.moments["first new token"] = client.first_token_at(second.release)
        after = [ask(self._server_url, NAME, prompt) for prompt in prompts]
        for (prompt, _, expected), reply in zip(QUESTIONS, after, strict=True):
            self._show(prompt, expected, reply)

        answers = [
            {
                "prompt": prompt,
                "before": {"expected": expected, "answer": old.text, "release": old.release},
                "after": {"expected": changed, "answer": new.text, "release": new.release},
                "ok": _says(old.text, expected) and _says(new.text, changed),
            }
            for (prompt, expected, changed), old, new in zip(QUESTIONS, before, after, strict=True)
        ]
        report = {
            "ok": all(answer["ok"] for answer in answers) and not client.summary()["failed"],
            "answers": answers,
            "requests": client.summary(),
            "seconds": {"first": _seconds(first.moments), "second": _seconds(second.moments)},
            "releases": json.loads(
                _run([sys.executable, "-m", "pipeline", "releases", "ls", "--json"])
            ),
        }
        self._show_report(report)
        return report

    def _clone(self) -> None:
        _run(["git", "clone", "--quiet", self._remote, str(self._checkout)], env=self._git_env)
        self._git("checkout", "--quiet", "-B", "main")

    def _push(self, message: str, files: Mapping[str, str]) -> _Push:
        from pipeline.cli.progress import follow_stages

        for name, text in files.items():
            (self._checkout / name).write_text(text)
        self._git("add", "--all")
        self._git("commit", "--quiet", "--message", message)
        revision = self._git("rev-parse", "HEAD").strip()
        moments = {"git push": time.time()}
        self._git("push", "--quiet", "origin", "main")
        moments["push answered"] = time.time()
        job = follow_stages(self._store, self._job_for(revision), self._home, self._console)
        if job.outcome is None or job.outcome.result != "promoted" or job.outcome.release is None:
            outcome = job.outcome.model_dump_json() if job.outcome else job.state
            raise PipelineError(
                f"{job.id} did not lead to a served release: {outcome}; the job's log: "
                f"{self._home.jobs_dir / job.id / 'log.txt'}"
            )
        self._console.print(f"  {job.outcome.counts}")
        moments["job queued"] = job.created_at
        moments["job started"] = job.started_at or job.created_at
        return _Push(release=job.outcome.release, moments=moments | self._stages_of(job.id))

    def _job_for(self, revision: str) -> str:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            for job in self._store.list(pipeline=NAME):
                if job.spec.revisions and job.spec.revisions.new_sha == revision:
                    return job.id
            time.sleep(0.02)
        raise PipelineError(
            f"no job was started for {revision}; look at {self._home.log_file('hub')} and "
            f"{self._home.log_file('receiver')}"
        )

    def _stages_of(self, job_id: str) -> dict[str, float]:
        from pipeline.retrain.metrics import read_metrics

        events, _ = read_metrics(self._home.jobs_dir / job_id / "metrics.jsonl", 0)
        return {f"{event.stage} done": event.time for event in events if event.event == "end"}

    def _git(self, *arguments: str) -> str:
        author = ["-c", "user.name=demo", "-c", "user.email=demo@example.invalid"]
        return _run(["git", *author, *arguments], cwd=self._checkout, env=self._git_env)

    def _show(self, prompt: str, expected: str, reply: Any) -> None:
        mark = "[green]✓[/]" if _says(reply.text, expected) else f"[red]✗ expected{expected}[/]"
        self._console.print(
            f"  {mark} {prompt}[bold]{reply.text.rstrip()}[/]   [dim]{reply.release}[/]"
        )

    def _show_report(self, report: dict[str, Any]) -> None:
        from rich.table import Table

        requests = report["requests"]
        by_release = ", ".join(f"{n} by {id}" for id, n in requests["by_release"].items())
        self._console.print(
            f"\n{requests['sent']} requests were sent during the second commit: "
            f"{requests['failed']} failed; "
            f"answered: {by_release}"
        )
        times = Table("step of the second commit", "seconds after the start of git push", box=None)
        for step, seconds in report["seconds"]["second"].items():
            times.add_row(step, f"{seconds:8.2f}")
        releases = Table("release", "dataset revision", "parent", box=None)
        for release in report["releases"]:
            mark = " (served)" if release["served"] else ""
            releases.add_row(
                release["id"] + mark, release["dataset_revision"], release["parent"] or "base model"
            )
        for table in (times, releases):
            self._console.print()
            self._console.print(table)
        self._console.print(
            "A release is a set of weights that never changes, with a record of its origin."
        )


def _seconds(moments: Mapping[str, float]) -> dict[str, float]:
    """Step → seconds after the start of `git push`. The steps are in the order of their times."""
    start = moments["git push"]
    return {
        step: round(moment - start, 3)
        for step, moment in sorted(moments.items(), key=lambda item: item[1])
        if step != "git push"
    }


def _says(answer: str, expected: str) -> bool:
    return answer.strip().startswith(expected.strip())


def _run(
    command: list[str], *, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> str:
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr or done.stdout).strip().removeprefix("pipeline: ")
        is_pipeline = command[:3] == [sys.executable, "-m", "pipeline"]
        shown = ["pipeline", *command[3:]] if is_pipeline else command
        raise PipelineError(f"`{shlex.join(shown)}` failed: {reason}")
    return done.stdout


def _what_next(folder: Path) -> str:
    activate = Path(sys.prefix) / "bin" / "activate"
    return f"""
The stack is still up. Try these commands. The first one is needed only in another shell:

  source {activate}
  cd {folder}
  pipeline status
  eval "$(pipeline env)"
  cd facts && $EDITOR facts.jsonl && git commit -am "My own fact" && git push
  pipeline jobs wait --commit HEAD
  pipeline releases ls
  pipeline releases rollback
  pipeline down
"""
