"""`pipeline status`: shows the services, the served release and its dataset commit, and the waiting
and running jobs."""

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.cli.options import JsonOption
from pipeline.cli.project import project_home
from pipeline.paths import Home

if TYPE_CHECKING:
    from pipeline.stack_record import Child


def status(
    as_json: JsonOption = False,
) -> None:
    """Show the services, the served release and its dataset commit, and the waiting and running
    jobs."""
    from pipeline.stack_record import running_settings

    home = project_home()
    report = status_report(home, running_settings(home))
    if as_json:
        print(json.dumps(report))
        return
    from rich.console import Console
    from rich.table import Table

    # The reason of an outcome may quote rows and settings. Switch off markup and emoji: otherwise
    # rich would read brackets and colons in such a reason as styles and emoji codes.
    console = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
    services = Table("service", "state", "pid", "up for", "restarts", "address", box=None)
    for service in report["services"]:
        uptime = service["uptime_seconds"]
        services.add_row(
            service["name"],
            service["state"],
            str(service["pid"] or "-"),
            f"{uptime:.0f} s" if uptime is not None else "-",
            str(service["restarts"]) + (f" ({service['last_end']})" if service["last_end"] else ""),
            service["url"] or "-",
        )
    console.print(services if report["services"] else "Nothing is up; start it with: pipeline up")
    console.print(f"engine {report['engine']['name']}, because {report['engine']['reason']}")
    for notice in report["notices"]:
        console.print("!", style="bold", end=" ")
        console.print(notice)
    for pipeline in report["pipelines"]:
        served, head = pipeline["served"], pipeline["dataset_head"]
        console.print(f"\n{pipeline['name']}", style="bold", end="")
        console.print(f" follows {pipeline['dataset']} ({pipeline['ref']}), ", end="")
        console.print(f"whose newest commit is {(head or 'unknown')[:12]}")
        if served is None:
            console.print("  serves       nothing yet")
        else:
            # `is_live` is false if no server reports a served release. `served` then comes from the
            # link `current` on disk, which names the release that was served last.
            verb = "serves     " if served["is_live"] else "served last"
            origin = _origin(served, head, pipeline["head_changes_no_row"])
            console.print(f"  {verb}  {served['release']}, {origin}")
            if served["stands_in_for"]:
                console.print(f"  damaged      {_substitute_note(served)}")
            elif served["reason"]:
                console.print(f"  damaged      {served['reason']}; try: pipeline releases repair")
        if pipeline["pending_release"]:
            pending = pipeline["pending_release"]
            console.print(f"  pending      {pending}; the next server that starts will serve it")
        for job in pipeline["queue"]:
            console.print(f"  queue        {job['line']}")
        if pipeline["last_job"]:
            console.print(f"  last job     {pipeline['last_job']['line']}")
        if pipeline["refused"]:
            console.print(f"  refused      {pipeline['refused']}")


def status_report(home: Home, settings: Any) -> dict[str, Any]:
    """The report that `--json` prints."""
    from pipeline.job_store import reading_jobs
    from pipeline.journal import advice_after_refusal, describe
    from pipeline.moved_datasets import moved_datasets, moved_message, moved_next_step
    from pipeline.newest_commit import newest_commit
    from pipeline.stack_record import read_stack, stale_settings, suspended_stack
    from pipeline.tokens import load_tokens
    from pipeline.versions import installed_versions
    from serving.engine_choice import choose_engine
    from serving.weights.release_store import pending_release

    record = read_stack(home)
    children = record.children if record else ()
    now = time.time()
    suspension = suspended_stack(record) if record else None
    changed = stale_settings(home)
    suspended = _suspended_webhooks(home, settings) if record else []
    moved = moved_datasets(settings, load_tokens(home.tokens_file)) if record else {}
    report: dict[str, Any] = {
        "home": str(home.root),
        "notices": [
            *([suspension] if suspension else []),
            *([changed] if changed else []),
            *(
                f"{child.name} does not answer; if it stays silent, the stack kills it and starts "
                f"it again (log: {home.log_file(child.name)})"
                for child in children
                if _state(child) == "hung"
            ),
            *(
                f"webhook {webhook['id']} is suspended after repeated failures, so its deliveries "
                f"wait; to send them: pipeline webhooks enable {webhook['id']}"
                for webhook in suspended
            ),
            *(
                f"{moved_message(dataset, present)}; {moved_next_step(present)}"
                for dataset, present in moved.items()
            ),
        ],
        "suspended_webhooks": suspended,
        "versions": installed_versions(),
        "engine": asdict(choose_engine(settings.serving.engine)),
        "uptime_seconds": round(now - record.started_at, 1) if record else None,
        "services": [
            {
                "name": child.name,
                "state": _state(child),
                "pid": child.process.pid if child.process else None,
                "url": child.url,
                "uptime_seconds": child.started_at and round(now - child.started_at, 1),
                "restarts": child.num_restarts,
                "last_end": child.last_end,
            }
            for child in children
        ],
        "pipelines": [],
    }
    with reading_jobs(settings, home) as store:
        paused = store.paused() if store is not None else {}
        for pipeline in settings.pipelines:
            folder = home.releases_dir / pipeline.name
            jobs = store.list(pipeline=pipeline.name, limit=20) if store is not None else []
            head = (
                newest_commit(home, settings, pipeline)
                if record and settings.is_on_own_hub(pipeline)
                else None
            )
            lines = [{"id": job.id, "state": job.state, "line": describe(job)} for job in jobs]
            report["pipelines"].append(
                {
                    "name": pipeline.name,
                    "dataset": pipeline.dataset,
                    "ref": pipeline.ref,
                    "dataset_head": head,
                    "head_changes_no_row": any(
                        job.outcome is not None
                        and job.outcome.result == "unchanged"
                        and job.outcome.stage != "claim"
                        and job.spec.revisions is not None
                        and job.spec.revisions.new_sha == head
                        for job in jobs
                    ),
                    "served": _served(folder, settings.server_url(pipeline)),
                    "pending_release": pending_release(folder),
                    "queue_age_seconds": max(
                        (round(now - job.created_at, 1) for job in jobs if not job.has_ended),
                        default=None,
                    ),
                    "queue": [
                        line for job, line in zip(jobs, lines, strict=True) if not job.has_ended
                    ],
                    "last_job": next(
                        (line for job, line in zip(jobs, lines, strict=True) if job.has_ended),
                        None,
                    ),
                    "paused_since": paused.get(pipeline.name),
                    "refused": advice_after_refusal(jobs),
                }
            )
    return report


def _state(child: "Child") -> str:
    """The state of a service: `up`, `hung` (its process runs, but does not answer) or `down`."""
    from jobs.launchers.process import is_alive

    if child.process is None or not is_alive(child.process):
        return "down"
    return "hung" if child.is_silent else "up"


def _origin(served: dict[str, Any], head: str | None, head_changes_no_row: bool) -> str:
    if served["unreadable"]:
        return f"unreadable: {served['unreadable']}"
    trained_on = served["dataset_revision"] or "no dataset"
    if head is None:
        return f"trained on {trained_on[:12]}"
    if head == trained_on:
        return f"trained on {trained_on[:12]}, the newest commit"
    note = ", which changes no row" if head_changes_no_row else ""
    return f"trained on {trained_on[:12]}; the newest commit is {head[:12]}{note}"


def _substitute_note(served: dict[str, Any]) -> str:
    reason = served["reason"] or f"{served['stands_in_for']} could not be served"
    return (
        f"{reason}; {served['release']} is served as a substitute; the next training learns "
        f"the rows again that only {served['stands_in_for']} had learned; to start it: pipeline "
        "jobs run"
    )


def _served(pipeline_dir: Path, url: str) -> dict[str, Any] | None:
    """The release that the server at `url` reports as served. If no server reports a release, this
    is the release that was served last. None if no release was served yet."""
    from pipeline.probes import server_state
    from serving.errors import ReleaseError
    from serving.weights.release_store import load_release, served_release, stood_in_for

    answer = server_state(url)
    release_id, revision, unreadable = answer.get("release"), answer.get("dataset_revision"), None
    is_live, stands_in_for = release_id is not None, answer.get("stands_in_for")
    if not is_live:
        try:
            served = served_release(pipeline_dir)
            if served is None:
                return None
            release_id = served.name
            # `stands_in_for` is the damaged release that the served release replaces. Read it from
            # the disk only if no server answers. If a server answers that it serves no release, it
            # serves no substitute either.
            if not answer:
                stands_in_for = stood_in_for(pipeline_dir)
            revision = load_release(served).lineage.dataset_revision
        except ReleaseError as error:
            release_id, unreadable = release_id or "current", str(error)
    return {
        "release": release_id,
        "is_live": is_live,
        "dataset_revision": revision,
        "stands_in_for": stands_in_for,
        "reason": answer.get("reason"),
        "unreadable": unreadable,
        "url": url,
    }


def _suspended_webhooks(home: Home, settings: Any) -> list[dict[str, Any]]:
    """The suspended webhooks of the hub; empty if the hub does not answer."""
    from pipeline.tokens import load_tokens
    from receiver.errors import ReceiverError
    from receiver.webhooks import list_webhooks

    try:
        token = load_tokens(home.tokens_file).hub
        webhooks = list_webhooks(endpoint=settings.hub_url, token=token)
    except ReceiverError:
        return []
    return [
        {"id": webhook.id, "url": webhook.url}
        for webhook in webhooks
        if webhook.status == "suspended"
    ]
