"""`pipeline up` and `down`: start and stop the stack. `pipeline pause` and `resume`: hold back the
jobs of pushes, and start them again."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Annotated

import typer

from jobs.errors import StoreError
from jobs.process import is_alive, send_signal
from jobs.spec import is_git_url
from jobs.store import JobStore
from pipeline.cli.terminal import ChangesStack, project_home
from pipeline.doctor.facts import Journal
from pipeline.errors import PipelineError
from pipeline.paths import Home
from pipeline.runner.job_store import check_schemas, open_job_store
from pipeline.settings import Settings, load_settings
from pipeline.stack.record import read_stack, running_settings
from pipeline.stack.services import RUNNER, choose, services_of
from pipeline.stack.subscriptions import subscribe, subscribe_at_other_hubs
from pipeline.stack.supervisor import STOP_SECONDS, Stack, lock_stack
from pipeline.tokens import load_tokens, tokens_of_hub

app = typer.Typer()

NameArgument = Annotated[
    str | None, typer.Argument(help="The pipeline, if several are configured.")
]
REPORT_SECONDS = 5.0
"""If `down` has waited for this long, it says what it waits for."""


@app.command(cls=ChangesStack)
def up(
    detach: Annotated[
        bool,
        typer.Option("--detach", "-d", help="Run in the background; return when the stack is up."),
    ] = False,
    only: Annotated[
        str | None, typer.Option(metavar="SERVICES", help="Only these, as in hub,receiver.")
    ] = None,
) -> None:
    """Start the stack: the hub, the receiver, the job runner, and one completion server for each
    pipeline. Run until Ctrl-C. Until then, restart each service that ends or hangs. With --detach,
    `pipeline down` stops the stack."""
    home = Home.find()
    settings = load_settings()
    settings.pipeline(settings.pipelines[0].name if settings.pipelines else None)
    services = choose(only, services_of(settings))
    names = {service.name for service in services}
    check_schemas(settings, home, is_hub_here="hub" in names)
    missing = [fault for each in settings.pipelines if (fault := each.missing_base())]
    if missing and RUNNER.name in names:
        raise PipelineError("; ".join(missing))
    if detach:
        _detach(home, [] if only is None else ["--only", only])
        return

    # `down` sends SIGTERM. Make SIGTERM end the stack in the same way as Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    has_hub, file = "hub" in names, home.tokens_file
    tokens = load_tokens(file) if has_hub else tokens_of_hub(file, settings.hub_url)
    say = partial(print, flush=True)
    stack = Stack(home, services, only=only, hang_seconds=settings.stack.hang_seconds)
    try:
        stack.start(say)
        if has_hub:
            subscribe(settings, home, tokens)
        if "receiver" in names:
            for line in subscribe_at_other_hubs(settings, home, tokens):
                say(f"another hub: {line}")
        for line in _where_to_push(settings):
            say(line)
        if "hub" in names:
            say("to see and drive it in a browser: pipeline open")
        stack.mark_ready()  # from here on, `up --detach` prints no further line
        journal = Journal(open_job_store(settings, home))
        store_error = None
        while True:
            try:
                lines, store_error = journal.news(), None
            except StoreError as error:
                # Continue, because an error such as a full disk is no reason to stop the stack.
                # Each turn of this loop may raise the same error again. Print it only once.
                lines = [] if str(error) == store_error else [str(error)]
                store_error = str(error)
            for line in [*stack.check_services(), *lines]:
                # The disk of up's log may be full, which is no reason to stop the stack.
                with contextlib.suppress(OSError):
                    say(line)
            time.sleep(0.2)
    except KeyboardInterrupt:
        print("stopping")
    finally:
        # From here on, ignore Ctrl-C and SIGTERM. A second Ctrl-C would end this process before all
        # child processes are stopped.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        stack.stop()


@app.command(cls=ChangesStack)
def down() -> None:
    """Stop the stack of this state folder."""
    home = project_home()
    record = read_stack(home)
    if record is None:
        raise PipelineError(f"nothing is up in {home.root}, so there is nothing to stop")
    os.kill(record.process.pid, signal.SIGTERM)
    send_signal(record.process.pid, signal.SIGCONT)  # a suspended stack would not stop
    began = time.monotonic()
    deadline = began + STOP_SECONDS * (len(record.children) + 1)
    is_reported = False
    while is_alive(record.process):
        if time.monotonic() > (deadline if is_reported else began + REPORT_SECONDS):
            waits_for = (
                f"the stack (process {record.process.pid}) has not stopped yet; to see why, read "
                f"{home.log_file('up')}"
            )
            if is_reported:
                raise PipelineError(waits_for)
            print(f"waiting: {waits_for}", file=sys.stderr)
            is_reported = True
        time.sleep(0.05)
    print("stopped " + ", ".join(child.name for child in reversed(record.children)))


def _where_to_push(settings: Settings) -> Iterator[str]:
    for pipeline in settings.pipelines:
        hub = settings.other_hub(pipeline) or settings.hub_url
        is_git = is_git_url(pipeline.dataset)
        where = pipeline.dataset if is_git else f"{hub}/datasets/{pipeline.dataset}"
        note = ' (after: eval "$(pipeline env)")' if settings.is_on_own_hub(pipeline) else ""
        yield f"{pipeline.name}: push to {where}{note}"


def _detach(home: Home, arguments: Sequence[str] = ()) -> None:
    log = home.log_file("up")
    log.parent.mkdir(parents=True, exist_ok=True)
    # Empty the log, because the loop below must find only the lines of this start. Take the lock of
    # the stack first: if a stack is already up, the log belongs to that stack, and `lock_stack`
    # raises an error.
    lock = lock_stack(home)
    log.write_bytes(b"")
    lock.release()
    # Open the log for appending, as `rotate` requires.
    with log.open("ab") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "pipeline", "up", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            start_new_session=True,
        )
    num_printed = 1  # the first line names the stack, as this command has already done
    try:
        while True:
            # Read the stack's record (`stack.json`) before the log. If the record says that the
            # stack is ready, the log already contains every line that this loop prints.
            record = read_stack(home)
            has_ended = process.poll() is not None
            text = log.read_text(errors="replace")
            lines = text[: text.rfind("\n") + 1].splitlines(True)
            if has_ended:
                raise PipelineError("".join(lines[1:]).strip().removeprefix("pipeline: "))
            print("".join(lines[num_printed:]), end="", flush=True)
            num_printed = max(num_printed, len(lines))
            if record is not None and record.process.pid == process.pid and record.is_ready:
                return
            time.sleep(0.05)
    except KeyboardInterrupt:
        # The user expects that Ctrl-C ends everything. So stop the stack, which would otherwise
        # continue to start in the background.
        process.terminate()
        process.wait()
        raise


@app.command(cls=ChangesStack)
def pause(name: NameArgument = None) -> None:
    """Start no job for pushes until `pipeline resume`. Pushes still arrive, and wait as one job. A
    job that runs goes on, and `pipeline jobs run` works as usual."""
    pipeline, store = _of_pipeline(name)
    with store:
        is_new = store.pause(pipeline)
    state = "is paused" if is_new else "was paused already"
    print(f"{pipeline} {state}; to go on: pipeline resume {pipeline}")


@app.command(cls=ChangesStack)
def resume(name: NameArgument = None) -> None:
    """End a pause. If a push has arrived meanwhile, its job starts, and trains on the newest
    commit."""
    pipeline, store = _of_pipeline(name)
    with store:
        was_paused = store.resume(pipeline)
    print(f"{pipeline} {'goes on' if was_paused else 'was not paused'}")


def _of_pipeline(name: str | None) -> tuple[str, JobStore]:
    """The pipeline's name, and the job store."""
    home = project_home()
    settings = running_settings(home)
    return settings.pipeline(name).name, open_job_store(settings, home)
