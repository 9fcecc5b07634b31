"""Makes a stopped stack old in seconds: commits, releases, jobs and deliveries that look like those
that it would have made itself."""

import json
import shutil
import sqlite3
import subprocess
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from serving.weights.release import RELEASE_FILE
from serving.weights.release_store import COUNTER, release_ids, set_current

SECONDS_APART = 60
"""Between two commits."""


def add_commits(repository: Path, up_to: int) -> None:
    """Commits to main that change a note and no row, until it has `up_to`."""
    counted = _git(repository, "rev-list", "--count", "main").strip()
    began = int(_git(repository, "log", "-1", "--format=%ct", "main"))
    lines = []
    for number in range(int(counted) + 1, up_to + 1):
        when = f"{began + SECONDS_APART * number} +0000"
        text = f"Note {number}.\n"
        lines += [
            "commit refs/heads/main",
            f"committer Past <past@example.invalid> {when}",
            f"data {len(text)}\n{text}",
        ]
        if not lines[:-3]:
            lines.append("from refs/heads/main^0")
        lines += ["M 100644 inline README.md", f"data {len(text)}\n{text}"]
    _git(repository, "fast-import", "--quiet", input="\n".join([*lines, ""]))


def add_releases(pipeline_dir: Path, up_to: int) -> None:
    """Copies of the newest release, each with a number of its own; the last one is served."""
    newest = release_ids(pipeline_dir)[-1]
    template = json.loads((pipeline_dir / newest / RELEASE_FILE).read_bytes())
    number, _, digest = newest.removeprefix("r").partition("-")
    for each in range(int(number) + 1, up_to + 1):
        id = f"r{each:06d}-{digest}"
        folder = pipeline_dir / id
        shutil.copytree(pipeline_dir / newest, folder, copy_function=_link)
        # A new file: the old one is shared with the template.
        (folder / RELEASE_FILE).unlink()
        lineage = {**template["lineage"], "job_id": f"j{each:06d}"}
        record = {**template, "id": id, "lineage": lineage}
        (folder / RELEASE_FILE).write_text(json.dumps(record, indent=2))
        (pipeline_dir / COUNTER).write_text(f"{each}\n")
        set_current(pipeline_dir, id)


def add_jobs(jobs_dir: Path, up_to: int) -> None:
    """Copies of the newest ended job with its folder and its delivery."""
    with closing(sqlite3.connect(jobs_dir / "jobs.sqlite")) as database:
        job = _newest(database, "jobs", "number")
        delivery = _newest(database, "deliveries", "received_at")
        template = f"j{job['number']:06d}"
        for number in range(int(str(job["number"])) + 1, up_to + 1):
            id = f"j{number:06d}"
            values = {name: _renamed(value, template, id) for name, value in job.items()}
            _insert(database, "jobs", {**values, "number": number})
            answered = {"id": f"past-{number}", "job_number": number, "arrival": number}
            _insert(database, "deliveries", {**delivery, **answered})
            (jobs_dir / id).mkdir()
            outcome = (jobs_dir / template / "outcome.json").read_text()
            (jobs_dir / id / "outcome.json").write_text(outcome.replace(template, id))
        database.commit()


def add_deliveries(hub_database: Path, up_to: int) -> None:
    """Copies of the hub's newest event, delivered."""
    with closing(sqlite3.connect(hub_database)) as database:
        event = _newest(database, "events", "seq")
        delivery = _newest(database, "deliveries", "event_seq")
        for seq in range(int(str(event["seq"])) + 1, up_to + 1):
            _insert(database, "events", {**event, "seq": seq})
            _insert(database, "deliveries", {**delivery, "id": f"past-{seq}", "event_seq": seq})
        database.commit()


def _git(repository: Path, *arguments: str, input: str | None = None) -> str:
    command = ["git", "--git-dir", str(repository), *arguments]
    done = subprocess.run(command, input=input, capture_output=True, text=True, check=True)
    return done.stdout


def _link(source: str, target: str) -> None:
    Path(target).hardlink_to(source)


def _newest(database: sqlite3.Connection, table: str, column: str) -> dict[str, object]:
    found = database.execute(f"SELECT * FROM {table} ORDER BY {column} DESC LIMIT 1")
    names = [description[0] for description in found.description]
    return dict(zip(names, found.fetchone(), strict=True))


def _insert(database: sqlite3.Connection, table: str, values: Mapping[str, object]) -> None:
    columns, places = ", ".join(values), ", ".join("?" * len(values))
    database.execute(f"INSERT INTO {table} ({columns}) VALUES ({places})", [*values.values()])


def _renamed(value: object, template: str, id: str) -> object:
    return value.replace(template, id) if isinstance(value, str) else value
