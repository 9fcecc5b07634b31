"""`pipeline status`: what runs, what is served, what it has seen, what is queued, on one screen."""

import json
import time
from pathlib import Path
from typing import Any

from pipeline.cli.options import JsonOption
from pipeline.paths import Home


def status(
    as_json: JsonOption = False,
) -> None:
    """Show what runs, what is served, which commit it has seen, and what is queued."""
    from pipeline.settings import load_settings

    report = gather(Home.find(), load_settings())
    if as_json:
        print(json.dumps(report))
        return
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, soft_wrap=True)
    services = Table("service", "state", "pid", "up for", "restarts", "address", box=None)
    for service in report["services"]:
        uptime = service["uptime_seconds"]
        services.add_row(
            service["name"],
            service["state"],
            str(service["pid"] or "-"),
            f"{uptime:.0f} s" if uptime is not None else "-",
            str(service["restarts"]),
            service["url"] or "-",
        )
    console.print(services if report["services"] else "Nothing is up; start it with: pipeline up")
    for notice in report["notices"]:
        console.print(f"[bold]![/] {notice}")
    for pipeline in report["pipelines"]:
        served, head = pipeline["served"], pipeline["dataset_head"]
        console.print(f"\n[bold]{pipeline['name']}[/] follows {pipeline['dataset']}", end="")
        console.print(f" ({pipeline['ref']}), whose head is {(head or 'unknown')[:12]}")
        if served is None:
            console.print("  serves       nothing yet")
        else:
            # The server's own word where it gave one, else what `current` says.
            verb = "serves     " if served["is_live"] else "served last"
            seen = _seen(served, head, pipeline["head_changes_no_row"])
            console.print(f"  {verb}  {served['release']}, {seen}")
        if pipeline["pending_release"]:
            pending = pipeline["pending_release"]
            console.print(f"  pending      {pending}, for the next server to start")
        for job in pipeline["queue"]:
            console.print(f"  queue        {job['line']}")
        if pipeline["last_job"]:
            console.print(f"  last job     {pipeline['last_job']['line']}")


def gather(home: Home, settings: Any) -> dict[str, Any]:
    """The report as `--json` prints it."""
    from jobs.launchers.process import is_alive
    from pipeline.job_store import reading_jobs
    from pipeline.journal import describe
    from pipeline.stack import read_stack, stale_settings
    from pipeline.versions import installed_versions
    from serving.weights.releases import pending_release

    record = read_stack(home)
    children = record.children if record else ()
    now = time.time()
    changed = stale_settings(home)
    suspended = _suspended_webhooks(home, settings) if record else []
    report: dict[str, Any] = {
        "home": str(home.root),
        "notices": [
            *([changed] if changed else []),
            *(
                f"webhook {webhook['id']} is suspended after repeated failure, and what happens "
                f"waits; to deliver it: pipeline webhooks enable {webhook['id']}"
                for webhook in suspended
            ),
        ],
        "suspended_webhooks": suspended,
        "versions": installed_versions(),
        "uptime_seconds": round(now - record.started_at, 1) if record else None,
        "services": [
            {
                "name": child.name,
                "state": "up" if child.process and is_alive(child.process) else "down",
                "pid": child.process.pid if child.process else None,
                "url": child.url,
                "uptime_seconds": child.started_at and round(now - child.started_at, 1),
                "restarts": child.num_restarts,
            }
            for child in children
        ],
        "pipelines": [],
    }
    with reading_jobs(settings, home) as store:
        for pipeline in settings.pipelines:
            folder = home.releases_dir / pipeline.name
            jobs = store.list(pipeline=pipeline.name, limit=20) if store is not None else []
            head = (
                _head(home, settings, pipeline)
                if record and pipeline.dataset in settings.datasets_on_hub
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
                }
            )
    return report


def _seen(served: dict[str, Any], head: str | None, head_changes_no_row: bool) -> str:
    if served["unreadable"]:
        return f"unreadable: {served['unreadable']}"
    seen = served["dataset_revision"] or "no dataset"
    if head is None:
        return f"which has seen {seen[:12]}"
    if head == seen:
        return f"which has seen {seen[:12]}, the head"
    which = ", which changes no row" if head_changes_no_row else ""
    return f"which has seen {seen[:12]}, behind the head {head[:12]}{which}"


def _served(pipeline_dir: Path, url: str) -> dict[str, Any] | None:
    """What the server says that it serves; without its word, what was served last."""
    from serving.errors import ReleaseError
    from serving.weights.releases import load_release, served_release

    release_id, revision, unreadable = None, None, None
    live = _live(url)
    if live is not None:
        release_id, revision = live.get("release"), live.get("dataset_revision")
    else:
        try:
            served = served_release(pipeline_dir)
            if served is None:
                return None
            release_id = served.name
            revision = load_release(served).lineage.dataset_revision
        except ReleaseError as error:
            release_id, unreadable = release_id or "current", str(error)
    return {
        "release": release_id,
        "is_live": live is not None,
        "dataset_revision": revision,
        "unreadable": unreadable,
        "url": url,
    }


def _live(url: str) -> dict[str, Any] | None:
    """The server's `/health`; None where none is up, or it waits for a release."""
    import httpx

    try:
        response = httpx.get(f"{url}/health", timeout=5, trust_env=False)
    except httpx.HTTPError:
        return None
    try:
        answer = response.json()
    except ValueError:  # something else listens there
        return None
    return answer if isinstance(answer, dict) and answer.get("release") else None


def _suspended_webhooks(home: Home, settings: Any) -> list[dict[str, Any]]:
    """Of the hub that is up; none where it does not say."""
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


def _head(home: Home, settings: Any, pipeline: Any) -> str | None:
    """The newest commit on the hub; None where the hub does not say."""
    import httpx

    from pipeline.tokens import load_tokens

    try:
        response = httpx.get(
            f"{settings.hub_url}/api/datasets/{pipeline.dataset}/revision/{pipeline.ref}",
            headers={"Authorization": f"Bearer {load_tokens(home.tokens_file).hub}"},
            timeout=5,
            trust_env=False,
        )
    except httpx.HTTPError:
        return None
    return response.json()["sha"] if response.is_success else None
