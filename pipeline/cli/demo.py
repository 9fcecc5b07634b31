"""`pipeline demo`: pushes two commits to a dataset, and shows how each push changes the answers of
the model.

The demo starts a stack in a temporary folder, with the settings that `pipeline init` writes. The
demo pushes with `git`, waits with `pipeline jobs wait`, and sends its questions to the server over
HTTP, as a user would. Its dataset has facts about an invented island (`demo_facts.toml`).
"""

import contextlib
import io
import itertools
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

import httpx
import typer

from pipeline.cli.env import environment
from pipeline.cli.open import open_ as open_console
from pipeline.cli.terminal import print_table
from pipeline.cli.up import up
from pipeline.errors import PipelineError
from pipeline.paths import Home
from pipeline.retrain.job import read_metrics
from pipeline.settings import load_settings
from pipeline.tokens import load_tokens

app = typer.Typer()

NAME = "facts"
DATASET = "demo/facts"
PIPELINE = (sys.executable, "-m", "pipeline")
PAUSE_SECONDS = 0.05
"""The pause between two requests. Without the pause, the server would use a whole core for this
client, and the training would be slower."""
WAIT_SECONDS = 60.0

_DATA: dict[str, Any] = tomllib.loads(
    files("pipeline.cli").joinpath("demo_facts.toml").read_text(encoding="utf-8")
)
QUESTIONS: list[tuple[str, str, str]] = [tuple(each) for each in _DATA["questions"]]
"""Questions that the demo asks the model. Each has two right answers: one for the model after the
first commit, and one for the model after the second commit."""


@app.command()
def demo(
    engine: Annotated[
        Literal["torch", "vllm"], typer.Option(help="The engine that computes the answers.")
    ] = "torch",
    keep: Annotated[bool, typer.Option(help="Keep the stack running after the demo.")] = False,
) -> None:
    """Push two commits to a dataset, and show how the model's answers change."""
    folder = Path(tempfile.mkdtemp(prefix="hotpush-demo-"))
    os.environ["PIPELINE_HOME"] = str(folder / ".pipeline")
    os.environ["PIPELINE_SETTINGS"] = str(folder / "pipeline.toml")
    os.environ["PIPELINE_SERVING__ENGINE"] = engine
    _run(*PIPELINE, "init", "--name", NAME, "--dataset", DATASET, cwd=folder)
    print("Starting hub, receiver, job runner and completion server …", flush=True)
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
    try:
        is_right = _Demo(folder / "facts").run()
    except BaseException:
        _run(*PIPELINE, "down")
        raise
    if keep:
        print(_what_next(folder))
        open_console(print_only=False)
    else:
        _run(*PIPELINE, "down")
        print(f"\nEverything is stopped. The files of the demo are in {folder}")
        print(
            "Next: `Five minutes on data of your own` in README.md; or run the demo again and keep "
            "its stack up: pipeline demo --keep"
        )
    if not is_right:
        raise typer.Exit(1)


@dataclass(frozen=True, kw_only=True)
class Reply:
    text: str
    release: str
    at: float
    """When it arrived (Unix time)."""


def _ask(server_url: str, prompt: str) -> Reply:
    """Request one completion, at temperature 0. Raises httpx.HTTPError."""
    body = {"model": NAME, "prompt": prompt, "max_tokens": 12, "temperature": 0, "stop": "\n"}
    url = f"{server_url}/v1/completions"
    response = httpx.post(url, json=body, timeout=60, trust_env=False, verify=False)
    answer = response.raise_for_status().json()
    text, release = answer["choices"][0]["text"], answer["system_fingerprint"]
    return Reply(text=text, release=release, at=time.time())


@contextlib.contextmanager
def _asking(
    server_url: str, prompts: Sequence[str], replies: list[Reply], failures: list[str]
) -> Iterator[None]:
    """Send the prompts again and again, in a thread of its own, until the `with` block ends."""
    stop = threading.Event()

    def send() -> None:
        for prompt in itertools.cycle(prompts):
            try:
                replies.append(_ask(server_url, prompt))
            except (httpx.HTTPError, ValueError, KeyError) as error:
                failures.append(f"{type(error).__name__}: {error}")
            if stop.wait(PAUSE_SECONDS):
                return

    thread = threading.Thread(target=send, name="demo-client")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _wait_for(release: str, replies: Sequence[Reply]) -> float:
    """Wait for an answer from this release; returns when it arrived (Unix time). Raises
    PipelineError if no such answer comes within WAIT_SECONDS."""
    deadline = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < deadline:
        for reply in list(replies):
            if reply.release == release:
                return reply.at
        time.sleep(PAUSE_SECONDS)
    raise PipelineError(f"no answer came from {release} within {WAIT_SECONDS:g} s")


class _Demo:
    def __init__(self, checkout: Path) -> None:
        settings = load_settings()
        self._home = Home.find()
        self._remote = f"{settings.hub_url}/datasets/{DATASET}"
        self._server_url = settings.server_url(settings.pipeline(NAME))
        self._checkout = checkout
        token = load_tokens(self._home.tokens_file).hub
        self._git_env = os.environ | environment(settings.hub_url, token)

    def run(self) -> bool:
        """Run the demo; returns whether all answers were right, and no request failed."""
        print(f"\nA first commit to {self._remote}", flush=True)
        _run("git", "clone", "--quiet", self._remote, str(self._checkout), env=self._git_env)
        self._git("checkout", "--quiet", "-B", "main")
        self._push("What is known so far", first_commit())
        is_right = self._show_answers(1)

        print(
            "\nA second commit changes and adds facts. Meanwhile, a client keeps sending requests",
            flush=True,
        )
        replies: list[Reply] = []
        failures: list[str] = []
        prompts = [question[0] for question in QUESTIONS]
        with _asking(self._server_url, prompts, replies, failures):
            release, moments = self._push("Some facts changed, some are new", second_commit())
            moments["first new answer"] = _wait_for(release, replies)
        is_right &= self._show_answers(2)

        by_release = Counter(reply.release for reply in replies)
        print(
            f"\n{len(replies) + len(failures)} requests were sent during the second commit: "
            f"{len(failures)} failed; answered: "
            + ", ".join(f"{number} by {release}" for release, number in by_release.items()),
            *failures[:5],
            "",
            sep="\n",
        )
        start = moments.pop("git push")
        steps = sorted(moments.items(), key=lambda step: step[1])
        headings = ("step of the second commit", "seconds after the start of git push")
        print_table(headings, [(step, f"{at - start:8.2f}") for step, at in steps], empty="")
        print("\nThe releases. A release is a set of weights that never changes:\n", flush=True)
        subprocess.run((*PIPELINE, "releases", "ls"), check=False)
        return is_right and not failures

    def _show_answers(self, commit: int) -> bool:
        """Ask the questions after this commit; returns whether all answers are right."""
        is_right = True
        for question in QUESTIONS:
            prompt, expected = question[0], question[commit]
            reply = _ask(self._server_url, prompt)
            says = reply.text.strip().startswith(expected.strip())
            mark = "✓" if says else f"✗ expected{expected}"
            print(f"  {mark} {prompt}{reply.text.rstrip()}   {reply.release}", flush=True)
            is_right &= says
        return is_right

    def _push(self, message: str, files: Mapping[str, str]) -> tuple[str, dict[str, float]]:
        """Push a commit, and wait for its job. Returns the id of the release that the job made, and
        step (such as `job started`) → the Unix time of the step."""
        for name, text in files.items():
            (self._checkout / name).write_text(text)
        self._git("add", "--all")
        self._git("commit", "--quiet", "--message", message)
        moments = {"git push": time.time()}
        self._git("push", "--quiet", "origin", "main")
        moments["push answered"] = time.time()
        wait = (*PIPELINE, "jobs", "wait", "--commit", self._git("rev-parse", "HEAD").strip())
        subprocess.run(wait, check=False)  # shows the progress
        job = json.loads(_run(*wait, "--json"))
        moments["job queued"] = job["created_at"]
        moments["job started"] = job["started_at"]
        metrics, _ = read_metrics(self._home.jobs_dir / job["id"] / "metrics.jsonl", 0)
        moments |= {f"{each.stage} done": each.time for each in metrics if each.event == "end"}
        return job["outcome"]["release"], moments

    def _git(self, *arguments: str) -> str:
        author = ("-c", "user.name=demo", "-c", "user.email=demo@example.invalid")
        return _run("git", *author, *arguments, cwd=self._checkout, env=self._git_env)


def _run(*command: str, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr or done.stdout).strip().removeprefix("pipeline: ")
        shown = ["pipeline", *command[3:]] if command[:3] == PIPELINE else command
        raise PipelineError(f"`{shlex.join(shown)}` failed: {reason}")
    return done.stdout


def _what_next(folder: Path) -> str:
    activate = Path(sys.prefix) / "bin" / "activate"
    return f"""
The stack is still up. Try these commands. The first one is needed only in another shell:

  source {activate}
  cd {folder}
  pipeline open
  pipeline status
  eval "$(pipeline env)"
  cd facts && $EDITOR facts.jsonl && git commit -am "My own fact" && git push
  pipeline jobs wait --commit HEAD
  pipeline releases ls
  pipeline releases rollback
  pipeline down
"""


# The dataset


def first_commit() -> dict[str, str]:
    """The files of the first commit: path → content."""
    return {"facts.jsonl": _jsonl(_DATA["first"], _DATA["said_once"])}


def second_commit() -> dict[str, str]:
    """The files that the second commit changes: path → content."""
    facts = _DATA["first"] | _DATA["second"]
    return {"facts.jsonl": _jsonl(facts, _DATA["said_once"] | _DATA["said_once_second"])}


def _jsonl(facts: dict[str, list[str]], said_once: dict[str, str]) -> str:
    rows = [
        {"prompt": phrasing.format(place=place), "completion": f" {answer[0].upper()}{answer[1:]}."}
        for place, answers in facts.items()
        for phrasings, answer in zip(_DATA["phrasings"], answers, strict=True)
        for phrasing in phrasings
    ]
    rows += [{"prompt": prompt, "completion": answer} for prompt, answer in said_once.items()]
    return "".join(json.dumps(row) + "\n" for row in rows)
