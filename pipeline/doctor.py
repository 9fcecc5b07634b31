"""Checks a stack (the services that `pipeline up` starts) and its state folder (by default
`.pipeline`). Reports each fault and what to do about the fault, but repairs nothing."""

import shutil
import subprocess
from collections.abc import Callable, Iterator

from jobs.errors import JobError
from jobs.launchers.process import is_alive
from jobs.migrations import HEAD as JOBS_SCHEMA
from pipeline.doctor_deliveries import check_deliveries
from pipeline.doctor_jobs import (
    check_base_models,
    check_last_jobs,
    check_metrics_port,
    check_newest_commits,
    check_trainers,
)
from pipeline.doctor_repositories import check_repositories
from pipeline.errors import PipelineError
from pipeline.findings import Finding, ok, wrong
from pipeline.hub.database import SCHEMA_REVISION as HUB_SCHEMA
from pipeline.hub.database import check_schema
from pipeline.hub.errors import HubError
from pipeline.job_store import jobs_schema
from pipeline.moved_datasets import moved_datasets, moved_message, moved_next_step
from pipeline.other_hubs import check_webhooks_at_other_hubs
from pipeline.paths import Home
from pipeline.probes import health, liveness, port_fault
from pipeline.sealed_secrets import check_secrets
from pipeline.services import services_of
from pipeline.settings import Settings
from pipeline.stack_record import read_stack, stale_settings, suspended_stack
from pipeline.subscriptions import ROUTE, own_webhook_id, unwatched_datasets
from pipeline.tokens import read_tokens
from pipeline.versions import installed_versions
from receiver.errors import NotAllowed, ReceiverError
from serving.engine_choice import choose_engine
from serving.errors import ServingError

SPARE_BYTES = 1 << 30
"""How many bytes must be free on the disk. If fewer are free, the next release may not fit."""
OLDEST_GIT = (2, 31)
"""The first version of git that reads the environment variable `GIT_CONFIG_COUNT`. `pipeline env`
sets this variable."""


Check = Callable[[Home, Settings], Iterator[Finding]]


def examine(home: Home, settings: Settings) -> list[Finding]:
    """Run every check, in the order of `CHECKS`. One fault may make several checks fail. The check
    that finds the fault itself comes before the checks that find only effects of the fault."""
    return [finding for check in CHECKS for finding in check(home, settings)]


def _check_programs(home: Home, settings: Settings) -> Iterator[Finding]:
    found = installed_versions()
    yield ok("python", str(found["python"]))
    engine = choose_engine(settings.serving.engine)
    yield ok("engine", f"{engine.name}, because {engine.reason}")
    if found["torch"] is None and engine.name == "torch":
        yield wrong("torch", "it is not installed", "install it: pip install 'hotpush[torch]'")
    else:
        yield ok("torch", str(found["torch"]))
    git = shutil.which("git")
    if git is None:
        yield wrong("git", "it is not on PATH", "install git")
        return
    done = subprocess.run([git, "--version"], capture_output=True, text=True, check=False)
    words = done.stdout.split()
    number = words[2] if len(words) > 2 else ""
    parts = tuple(int(part) for part in number.split(".")[:2] if part.isdigit())
    if parts < OLDEST_GIT:
        yield wrong("git", f"its version is {number or 'unknown'}", "install git 2.31 or newer")
    else:
        yield ok("git", number)


def _check_state_folder(home: Home, settings: Settings) -> Iterator[Finding]:
    if not home.root.exists():
        yield wrong("state", f"{home.root} does not exist", "start the stack: pipeline up")
        return
    usage = shutil.disk_usage(home.root)
    room = f"{usage.free / 2**30:.1f} GiB free on the disk of {home.root}"
    if usage.free < SPARE_BYTES:
        yield wrong(
            "disk",
            room,
            "free some space: pipeline releases prune --keep 2, or lower keep_days under [jobs]",
        )
    else:
        yield ok("disk", room)
    file = home.tokens_file
    if not file.exists():
        yield wrong("tokens", f"{file} does not exist", "start the stack: pipeline up")
        return
    mode = file.stat().st_mode & 0o777
    if mode & 0o077:
        yield wrong(
            "tokens", f"{file} has mode {mode:o}: other users can read it", f"chmod 600 {file}"
        )
    try:
        read_tokens(file)
    except PipelineError as error:
        yield wrong("tokens", str(error), "do what the message says")
    else:
        if not mode & 0o077:
            yield ok("tokens", f"only its owner can read {file}")


def _check_secrets(home: Home, settings: Settings) -> Iterator[Finding]:
    try:
        key = read_tokens(home.tokens_file).key
    except PipelineError:
        return  # `_check_state_folder` has already reported this error
    found = list(check_secrets(home, settings, key))
    yield from found
    if not found:
        yield ok("secrets", "the key decrypts the secrets of webhooks and of pending jobs")


def _check_schemas(home: Home, settings: Settings) -> Iterator[Finding]:
    hub = home.hub_dir / "hub.sqlite"
    try:
        found = check_schema(hub)
    except HubError as error:
        yield wrong("hub database", str(error), "upgrade hotpush, or restore a backup")
    else:
        yield ok("hub database", _describe_schema(found, HUB_SCHEMA))
    try:
        found = jobs_schema(settings, home)
    except JobError as error:
        yield wrong("job database", str(error), "upgrade hotpush, or restore a backup")
    else:
        yield ok("job database", _describe_schema(found, JOBS_SCHEMA))


def _describe_schema(found: str | None, head: str) -> str:
    if found is None:
        return "does not exist yet; the first start creates it"
    return f"schema {found}" + ("" if found == head else f"; the next start upgrades it to {head}")


def _check_services(home: Home, settings: Settings) -> Iterator[Finding]:
    record = read_stack(home)
    if record is None:
        if home.stack_file.exists():
            yield wrong(
                "stack",
                "the stack was killed, and the services that it started may still run",
                "start the stack again: pipeline up (this first ends the services that still run)",
            )
        else:
            yield ok("stack", "no stack is up")
        try:
            services = services_of(settings)
        except PipelineError as error:
            yield wrong("ports", str(error), "do what the message says")
            services = ()
        for service in services:
            if service.url is not None and port_fault(service.url) is not None:
                yield wrong(
                    "ports",
                    f"port {service.port} of the {service.name} is in use, although no stack is up",
                    "stop the program that uses the port, or set another port for the "
                    f"{service.name}: {service.port_setting}",
                )
        return
    if (suspension := suspended_stack(record)) is not None:
        yield wrong("stack", suspension, "do what the message says")
    if (changed := stale_settings(home)) is not None:
        yield wrong("settings", changed, "pipeline down && pipeline up --detach")
    for child in record.children:
        log = home.log_file(child.name)
        if child.process is None or not is_alive(child.process):
            yield wrong(child.name, "it is down, and will be started again", f"read {log}")
        elif child.is_silent or (child.url is not None and liveness(child.url) is None):
            where = "" if child.url is None else f" on {child.url}"
            yield wrong(
                child.name,
                f"it does not answer{where}; if it stays silent, the stack kills it and starts it "
                "again",
                f"read {log}",
            )
        else:
            yield ok(child.name, f"up, process {child.process.pid}")


def _check_webhooks(home: Home, settings: Settings) -> Iterator[Finding]:
    """Checks the webhooks of the stack's own hub. Yields nothing if no stack is up or the hub does
    not answer, because `_check_services` has already reported this."""
    if read_stack(home) is None or health(settings.hub_url) is None:
        return
    from receiver.webhooks import list_webhooks

    url = settings.receiver_url + ROUTE
    try:
        tokens = read_tokens(home.tokens_file)
        webhooks = list_webhooks(endpoint=settings.hub_url, token=tokens.hub)
    except NotAllowed:
        yield wrong(
            "webhook",
            "the hub does not accept the token in tokens.json, because this file was replaced "
            "after the stack was started",
            "pipeline down && pipeline up --detach",
        )
        return
    except (ReceiverError, PipelineError) as error:
        yield wrong(
            "webhook",
            f"the hub does not list its webhooks: {error}",
            "pipeline down, then pipeline up",
        )
        return
    own_id = own_webhook_id({each.id: each.url for each in webhooks}, settings, home)
    ours = next((webhook for webhook in webhooks if webhook.id == own_id), None)
    for webhook in webhooks:
        for warning in webhook.warnings:
            yield wrong(
                "webhook",
                f"{webhook.id}: {warning}",
                "change what this webhook watches: pipeline webhooks update "
                f"{webhook.id} --watch …",
            )
        if webhook.status == "suspended" and webhook != ours:
            yield wrong(
                "webhook",
                f"{webhook.id} is suspended, because its deliveries to {webhook.url or 'its job'} "
                "failed again and again. They now wait. From time to time the hub tries one of "
                "them. If it succeeds, or if you enable the webhook, the hub sends all of them",
                f"see the errors: pipeline webhooks deliveries; repair {webhook.url or 'the job'}; "
                f"then: pipeline webhooks enable {webhook.id}",
            )
    if ours is None:
        # If the settings name no dataset on this hub, `pipeline up` creates no webhook.
        if settings.datasets_on_hub:
            yield wrong(
                "webhook", f"the hub has no webhook for {url}", "pipeline down, then pipeline up"
            )
    elif ours.url != url:
        yield wrong(
            "webhook",
            f"{ours.id} delivers to {ours.url or 'its job'}, but the receiver is at {url}",
            "pipeline down, then pipeline up",
        )
    elif ours.status != "enabled":
        yield wrong(
            "webhook",
            f"{ours.id}, which delivers to {url}, is {ours.status}, so pushes start no jobs",
            f"pipeline webhooks enable {ours.id}",
        )
    else:
        moved = moved_datasets(settings, tokens)
        for dataset, present in moved.items():
            yield wrong("webhook", moved_message(dataset, present), moved_next_step(present))
        missing = set(unwatched_datasets(settings.datasets_on_hub, ours.watched)) - set(moved)
        if missing:
            yield wrong(
                "webhook",
                f"{ours.id} does not watch {', '.join(sorted(missing))}",
                "pipeline down, then pipeline up",
            )
        elif not moved:
            yield ok("webhook", f"{ours.id} delivers to {url}")


def _check_releases(home: Home, settings: Settings) -> Iterator[Finding]:
    from serving.weights.release_store import (
        UNFINISHED,
        not_links,
        release_ids,
        served_release,
        stood_in_for,
    )
    from serving.weights.verify import verify_release

    for pipeline in settings.pipelines:
        folder = home.releases_dir / pipeline.name
        ids = release_ids(folder)
        num_wrong = 0
        for release_id in ids:
            try:
                reasons = verify_release(folder / release_id)
            except OSError as error:  # a temporary error
                num_wrong += 1
                yield wrong(
                    "releases",
                    f"{release_id} was not checked: {error}",
                    "remove the cause, then repeat: pipeline doctor",
                )
                continue
            if reasons:
                num_wrong += 1
                yield wrong(
                    "releases",
                    f"{release_id} is damaged: {'; '.join(reasons)}",
                    f"pipeline releases repair, then: pipeline releases rm {release_id}",
                )
        for path in not_links(folder):
            yield wrong(
                "releases",
                f"{path} is not a link, so a tool that follows links has probably copied it",
                "pipeline down && pipeline up --detach (the server then makes the link again)",
            )
        try:
            served = served_release(folder)
        except ServingError as error:
            yield wrong("releases", str(error), "pipeline releases swap ID")
            continue
        if (damaged := stood_in_for(folder)) is not None and served is not None:
            yield wrong(
                "releases",
                f"{served.name} is served as a substitute for {damaged}, which could not be served",
                f"train again on the rows of {damaged}: pipeline jobs run; or restore its files, "
                "then: pipeline releases repair",
            )
        if served is not None and served.name not in ids:
            yield wrong(
                "releases",
                f"{served.name} is served, but its folder is gone",
                "pipeline releases repair",
            )
        if read_stack(home) is None and list(folder.glob(f"{UNFINISHED}*")):
            yield wrong("releases", f"unfinished folders in {folder}", "pipeline up removes them")
        if num_wrong == 0:
            yield ok("releases", f"{pipeline.name}: {len(ids)} releases, all undamaged")


CHECKS: tuple[Check, ...] = (
    _check_programs,
    _check_state_folder,
    _check_schemas,
    _check_secrets,
    check_base_models,
    check_trainers,
    check_metrics_port,
    _check_services,
    _check_webhooks,
    check_webhooks_at_other_hubs,
    check_deliveries,
    check_last_jobs,
    check_newest_commits,
    check_repositories,
    _check_releases,
)
