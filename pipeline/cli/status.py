"""`pipeline status`: shows the services, the served release and its dataset commit, and the waiting
and running jobs. `pipeline doctor`: prints what is wrong with a stack, and what to do about it."""

import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import typer

from pipeline.cli.terminal import JsonOption, project_home, table_lines
from pipeline.doctor.checks import (
    check_push_to,
    check_queue,
    check_services,
    check_webhooks,
    faults,
)
from pipeline.doctor.facts import Facts, state_of
from pipeline.paths import Home
from pipeline.settings import Settings
from pipeline.stack.record import running_settings

NOTICED = (check_services, check_webhooks, check_queue, check_push_to)

app = typer.Typer()


@app.command()
def doctor(as_json: JsonOption = False) -> None:
    """Check the stack and its state folder. Report what is wrong and what to do about it. The exit
    code is 1 if anything is wrong."""
    home = project_home()
    facts = Facts(home, running_settings(home))
    found = faults(facts)
    if as_json:
        print(json.dumps([fault.model_dump() for fault in found]))
    elif not found:
        print("nothing is wrong" if facts.stack else "nothing is wrong, but no stack is up")
    else:
        for fault in found:
            print(f"{fault.check}: {fault.message}\n  → {fault.next_step}")
    if found:
        raise typer.Exit(1)


@app.command()
def status(as_json: JsonOption = False) -> None:
    """Show the services, the served release and its dataset commit, and the waiting and running
    jobs."""
    home = project_home()
    report = status_report(home, running_settings(home))
    print(json.dumps(report) if as_json else "\n".join(_lines(report)))


def _lines(report: dict[str, Any]) -> Iterator[str]:
    services = [
        (
            service["name"],
            service["state"],
            str(service["pid"] or "-"),
            "-" if service["uptime_seconds"] is None else f"{service['uptime_seconds']:.0f} s",
            str(service["restarts"]) + (f" ({service['last_end']})" if service["last_end"] else ""),
            service["url"] or "-",
        )
        for service in report["services"]
    ]
    headings = ("service", "state", "pid", "up for", "restarts", "address")
    yield from table_lines(headings, services) or ["Nothing is up; start it with: pipeline up"]
    yield f"engine {report['engine']['name']}, because {report['engine']['reason']}"
    for notice in report["notices"]:
        yield f"! {notice}"
    for pipeline in report["pipelines"]:
        follows = f"{pipeline['name']} follows {pipeline['dataset']} ({pipeline['ref']})"
        yield f"\n{follows}, whose newest commit is {(pipeline['dataset_head'] or 'unknown')[:12]}"
        for name, text in _facts_of(pipeline):
            yield f"  {name:11}  {text}"


def _facts_of(pipeline: dict[str, Any]) -> Iterator[tuple[str, str]]:
    served = pipeline["served"]
    if served is None:
        yield "serves", "nothing yet"
    else:
        # `is_live` is false if no server reports a served release. `served` then is the release
        # that was served last, as the disk records it.
        origin = _origin(served, pipeline["dataset_head"])
        yield "serves" if served["is_live"] else "served last", f"{served['release']}, {origin}"
        if served["stands_in_for"]:
            yield "damaged", _substitute_note(served)
        elif served["reason"]:
            yield "damaged", f"{served['reason']}; try: pipeline releases rollback"
    if pending := pipeline["pending_release"]:
        yield "pending", f"{pending}; the next server that starts will serve it"
    for each in pipeline["followers"]:
        problem = f"; {each['error']}" if each["error"] else ""
        serves = f"{each['name']} serves {each['release'] or 'nothing yet'}"
        yield "follower", f"{serves}, as it said {each['age_seconds']:.0f} s ago{problem}"
    for job in pipeline["queue"]:
        yield "queue", job["line"]
    if pipeline["last_job"]:
        yield "last job", pipeline["last_job"]["line"]
    if pipeline["refused"]:
        yield "refused", pipeline["refused"]


def status_report(home: Home, settings: Settings) -> dict[str, Any]:
    """The report that `--json` prints."""
    facts, now = Facts(home, settings), time.time()
    record = facts.stack
    return {
        "home": str(home.root),
        "notices": [str(each) for each in faults(facts, NOTICED)],
        "engine": asdict(facts.engine),
        "uptime_seconds": round(now - record.started_at, 1) if record else None,
        "services": [
            {
                "name": child.name,
                "state": state_of(child),
                "pid": child.process.pid if child.process else None,
                "url": child.url,
                "uptime_seconds": child.started_at and round(now - child.started_at, 1),
                "restarts": child.num_restarts,
                "last_end": child.last_end,
            }
            for child in (record.children if record else ())
        ],
        "pipelines": [facts.of_pipeline(each, now) for each in settings.pipelines],
    }


def _origin(served: dict[str, Any], head: str | None) -> str:
    if served["unreadable"]:
        return f"unreadable: {served['unreadable']}"
    trained_on = served["dataset_revision"] or "no dataset"
    if head is None:
        return f"trained on {trained_on[:12]}"
    if head == trained_on:
        return f"trained on {trained_on[:12]}, the newest commit"
    return f"trained on {trained_on[:12]}; the newest commit is {head[:12]}"


def _substitute_note(served: dict[str, Any]) -> str:
    reason = served["reason"] or f"{served['stands_in_for']} could not be served"
    return (
        f"{reason}; {served['release']} is served as a substitute; the next training learns "
        f"the rows again that only {served['stands_in_for']} had learned; to start it: pipeline "
        "jobs run"
    )
