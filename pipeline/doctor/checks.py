"""Judges the facts of a stack and of its state folder (by default `.pipeline`). Reports each fault
and what to do about the fault, but repairs nothing."""

import math
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from sqlalchemy import func, select

from jobs.errors import JobError, StoreError
from jobs.process import is_suspended
from pipeline.doctor.facts import READ_IT, WAYS_ON, Facts, Finding, next_step, state_of, wrong
from pipeline.errors import PipelineError
from pipeline.hub.database import deliveries, read_only
from pipeline.paths import settings_file
from pipeline.settings import PipelineSettings
from pipeline.stack.push_to import RETRY_SECONDS, last_push
from pipeline.stack.record import restart, stale_settings
from pipeline.stack.subscriptions import FollowedHub, other_hubs, own_hub
from pipeline.tokens import read_tokens
from receiver.errors import NotAllowed, ReceiverError
from receiver.webhooks import WebhookRecord
from serving.errors import ServingError
from serving.weights.release_store import release_ids, served_release, stood_in_for
from serving.weights.verify import verify_release

SPARE_BYTES = 1 << 30
"""How many bytes must be free on the disk. If fewer are free, the next release may not fit."""
NEEDED_TO_TRAIN = ("torch", "transformers", "datasets", "safetensors")
INSTALL_TORCH = "in the folder of hotpush: pip install -e '.[torch]'"
NO_RUNNER_SECONDS = 30
"""Runners look for jobs several times a second."""

Check = Callable[[Facts], Iterator[Finding]]


def check_programs(facts: Facts) -> Iterator[Finding]:
    if facts.engine.name == "torch" and find_spec("torch") is None:
        yield wrong("torch", "it is not installed", INSTALL_TORCH)
    if shutil.which("git") is None:
        yield wrong("git", "it is not on PATH", "install git 2.31 or newer")


def check_state_folder(facts: Facts) -> Iterator[Finding]:
    root, file = facts.home.root, facts.home.tokens_file
    if not root.exists():
        yield wrong("state", f"{root} does not exist", "start the stack: pipeline up")
        return
    if (free := shutil.disk_usage(root).free) < SPARE_BYTES:
        room = f"{free / 2**30:.1f} GiB free on the disk of {root}"
        step = "pipeline releases prune --keep 2, or lower keep_days under [jobs]"
        yield wrong("disk", room, f"free some space: {step}")
    try:
        read_tokens(file)
    except PipelineError as error:
        yield wrong("tokens", str(error), READ_IT)
        return
    if (mode := file.stat().st_mode & 0o777) & 0o077:
        readable = f"{file} has mode {mode:o}: other users can read it"
        yield wrong("tokens", readable, f"chmod 600 {file}")


def check_training(facts: Facts) -> Iterator[Finding]:
    """Whether the jobs of each pipeline can start: with the user's own trainer (`command`), or with
    the built-in training and its base model."""
    for pipeline in facts.settings.pipelines:
        yield from _check_command(pipeline) if pipeline.command else _check_training(pipeline)


def _check_command(pipeline: PipelineSettings) -> Iterator[Finding]:
    assert pipeline.command is not None
    program = pipeline.command[0]
    if shutil.which(program) is None:
        what = "is not an executable program" if "/" in program else "is not a program on PATH"
        step = f"correct `command` under [[pipelines]] in {settings_file()}, or install the program"
        yield wrong("trainer", f"{pipeline.name}: {program} {what}, so every job fails", step)


def _check_training(pipeline: PipelineSettings) -> Iterator[Finding]:
    if (missing := pipeline.missing_base()) is not None:
        yield wrong("base model", missing, READ_IT)
    if absent := [name for name in NEEDED_TO_TRAIN if find_spec(name) is None]:
        missing = f"{pipeline.name}: {', '.join(absent)} not installed, which the training needs"
        yield wrong("trainer", missing, f"{INSTALL_TORCH}; or set `command` under [[pipelines]]")


def check_services(facts: Facts) -> Iterator[Finding]:
    record, home = facts.stack, facts.home
    if record is None:
        if home.stack_file.exists():
            killed = "the stack was killed, and the services that it started may still run"
            yield wrong(
                "stack", killed, "pipeline up (this first ends the services that still run)"
            )
        return
    if is_suspended(record.process):  # by SIGSTOP or Ctrl-Z
        fault = "is suspended, so it neither stops nor restarts a service"
        step = f"let it continue: kill -CONT {record.process.pid}"
        yield wrong("stack", f"the stack (process {record.process.pid}) {fault}", step)
    if (changed := stale_settings(home)) is not None:
        yield wrong("settings", changed, restart(home))
    for child in record.children:
        state, log = state_of(child), f"read {home.log_file(child.name)}"
        if state == "down":
            yield wrong(child.name, "it is down, and will be started again", log)
        elif state == "hung":
            silent = "it does not answer; if it stays silent, the stack kills and restarts it"
            yield wrong(child.name, silent, log)


def check_webhooks(facts: Facts) -> Iterator[Finding]:
    """The webhooks of the stack's own hub. Yields nothing before the stack is ready, or if the hub
    does not answer, because `check_services` reports this."""
    if facts.stack is None or not facts.stack.is_ready:
        return
    try:
        webhooks = facts.webhooks
    except NotAllowed:
        replaced = "tokens.json was replaced after the stack was started, so the hub refuses it"
        yield wrong("webhook", replaced, restart(facts.home))
        return
    except ReceiverError as error:
        silent = f"the hub does not list its webhooks: {error}"
        yield wrong("webhook", silent, restart(facts.home))
        return
    for webhook in webhooks:
        for warning in webhook.warnings:
            step = f"change what it watches: pipeline webhooks update {webhook.id} --watch …"
            yield wrong("webhook", f"{webhook.id}: {warning}", step)
        if webhook.status == "suspended":
            step = f"pipeline webhooks deliveries says why; pipeline webhooks enable {webhook.id}"
            waits = f"its deliveries to {webhook.url or 'its job'} failed again and again, and wait"
            yield wrong("webhook", f"{webhook.id} is suspended: {waits}", step)
    if facts.answering_hub is not None and facts.settings.datasets_on_hub:
        hub = own_hub(facts.settings, facts.home, facts.answering_hub)
        yield from _check_webhook(facts, "webhook", hub, webhooks)


def check_other_hubs(facts: Facts) -> Iterator[Finding]:
    """Whether the webhooks on the other hubs exist and are enabled. Yields nothing if no stack is
    up, if no pipeline follows a dataset on another hub, or if the stack's tokens cannot be read."""
    if facts.stack is None or facts.tokens is None:
        return
    check = "another hub"
    for hub in other_hubs(facts.settings, facts.home, facts.tokens):
        if (hindrance := hub.hindrance()) is not None:
            yield wrong(check, *hindrance)
            continue
        try:
            yield from _check_webhook(facts, check, hub, hub.webhooks())
        except ReceiverError as error:
            silent = f"{hub.url} does not list its webhooks: {error}"
            yield wrong(check, silent, restart(facts.home))


def _check_webhook(
    facts: Facts, check: str, hub: FollowedHub, webhooks: Sequence[WebhookRecord]
) -> Iterator[Finding]:
    """Whether one of the webhooks on this hub reports pushes to the receiver."""
    ours, step = hub.ours(webhooks), restart(facts.home)
    if ours is None:
        names = ", ".join(hub.datasets)
        yield wrong(check, f"no webhook at {hub.url} reports pushes to {names}", step)
        return
    if ours.url != hub.post_to:
        target = ours.url or "its job"
        fault = f"it delivers to {target}, but the receiver is at {hub.post_to}"
    elif ours.status != "enabled":
        fault = f"it delivers to {ours.url}, but is {ours.status}, so pushes start no jobs"
        where = "" if hub.record is not None else f" --endpoint {hub.url}"
        step = f"pipeline webhooks enable {ours.id}{where}"
    elif (missing := hub.unwatched(ours)) or "repo" not in ours.domains:
        fault = f"it does not watch {', '.join(missing) or 'pushes'}"
    else:
        return
    yield wrong(check, f"{ours.id} at {hub.url}: {fault}", step)


def check_deliveries(facts: Facts) -> Iterator[Finding]:
    is_dead = deliveries.c.status == "dead"
    try:
        with read_only(facts.home.hub_dir, facts.settings.hub.database) as connection:
            dead = connection.scalar(select(func.count()).where(is_dead))
    except StoreError as error:
        yield wrong(
            "deliveries", str(error), "let it be reached; if it is damaged, restore a backup"
        )
        return
    if dead:
        step = "pipeline webhooks deliveries says why; pipeline webhooks replay sends one again"
        yield wrong("deliveries", f"{dead} were given up, because every attempt failed", step)


def check_queue(facts: Facts) -> Iterator[Finding]:
    """Whether a runner takes the jobs that are due, if this stack has none."""
    if facts.stack is None or any(child.name == "runner" for child in facts.stack.children):
        return
    with suppress(JobError):  # `check_last_jobs` reports this
        jobs = [job for each in facts.jobs.values() for job in each]
        due = [job for job in jobs if job.state == "SCHEDULING" and job.waits_for is None]
        since = time.time() - min((job.run_after for job in due), default=math.inf)
        if since > NO_RUNNER_SECONDS and not any(job.state == "RUNNING" for job in jobs):
            first = min(due, key=lambda job: job.run_after)
            fault = f"{first.id} is due since {since:.0f} s, and no runner takes it"
            yield wrong("runner", fault, "start one, here or elsewhere: pipeline up --only runner")


def check_push_to(facts: Facts) -> Iterator[Finding]:
    for pipeline in facts.settings.pipelines:
        last = last_push(facts.releases_dir(pipeline))
        if pipeline.push_to is not None and last is not None and last.failure is not None:
            again = f"it is tried again every {RETRY_SECONDS / 60:.0f} min"
            yield wrong("push_to", f"{pipeline.name}: {last.failure}; {again}", READ_IT)


def check_last_jobs(facts: Facts) -> Iterator[Finding]:
    try:
        jobs_of = facts.jobs
    except JobError as error:
        yield wrong("jobs", str(error), READ_IT)
        return
    for name, jobs in jobs_of.items():
        last = next((job for job in jobs if job.has_ended), None)
        if last and (outcome := last.outcome) and outcome.result in ("failed", "rejected"):
            step = WAYS_ON if outcome.result == "rejected" else "push again, or: pipeline jobs run"
            ended = f"{name}: {last.id} {outcome.result}: {outcome.reason}"
            yield wrong(
                "jobs", ended, f"pipeline jobs logs {last.id}; then {next_step(jobs, step)}"
            )


def check_releases(facts: Facts) -> Iterator[Finding]:
    for pipeline in facts.settings.pipelines:
        folder = facts.releases_dir(pipeline)
        ids = release_ids(folder)
        for id in ids:
            yield from _check_release(folder / id)
        try:
            served = served_release(folder)
        except ServingError as error:
            yield wrong("releases", str(error), "pipeline releases swap ID")
            continue
        if served is None:
            continue
        if (damaged := stood_in_for(folder)) is not None:
            yield wrong(
                "releases",
                f"{served.name} is served as a substitute for {damaged}, which could not be served",
                f"train again on the rows of {damaged}: pipeline jobs run; or restore its files, "
                f"then: {restart(facts.home)}",
            )
        if served.name not in ids:
            gone = f"{served.name} is served, but its folder is gone"
            yield wrong("releases", gone, "pipeline releases rollback")


def _check_release(folder: Path) -> Iterator[Finding]:
    try:
        reasons = verify_release(folder)
    except OSError as error:  # a temporary error
        unread = f"{folder.name} was not checked: {error}"
        yield wrong("releases", unread, "remove the cause, then repeat: pipeline doctor")
        return
    if reasons:
        yield wrong(
            "releases",
            f"{folder.name} is damaged: {'; '.join(reasons)}",
            f"restore its files, or: pipeline releases rm {folder.name}; if it is served, first: "
            "pipeline releases rollback",
        )


CHECKS: tuple[Check, ...] = (
    check_programs,
    check_state_folder,
    check_training,
    check_services,
    check_webhooks,
    check_other_hubs,
    check_deliveries,
    check_queue,
    check_last_jobs,
    check_releases,
    check_push_to,
)
"""One fault may make several checks fail. The check that finds the fault itself comes before the
checks that find only effects of the fault."""


def faults(facts: Facts, checks: Iterable[Check] = CHECKS) -> list[Finding]:
    """What these checks find wrong."""
    return [fault for check in checks for fault in check(facts)]
