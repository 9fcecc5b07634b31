"""Run the rows of a table one after another, each a program of its own, and keep what each says.

    python -m tests.bench loop|serving [--rows NAME …] [--small]

`bench-results/TABLE.json` is written after every row, and `TABLE.md` from it; a row that is run
again takes the place of the one before. A row that fails is recorded with its error, the others go
on, and the exit code is 1. A target that is missed is a figure, not a failure.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from tests.bench.machine import code_revision, this_machine
from tests.bench.report import Report, Row, markdown
from tests.bench.result import Result
from tests.stack_fixtures import end_with_this_process

ROOT = Path(__file__).parents[2]
ERROR_CHARACTERS = 4_000
END_SECONDS = 30
"""For a program that was told to end, to stop what it started."""


@dataclass(frozen=True, kw_only=True)
class Program:
    name: str
    what: str
    module: str


def _rows(*rows: tuple[str, str]) -> tuple[Program, ...]:
    return tuple(
        Program(name=name, what=what, module=f"tests.bench.bench_{name.replace('-', '_')}")
        for name, what in rows
    )


TABLES = {
    "loop": _rows(
        ("first-line", "`git push` returned → first line of the job's log"),
        ("training", "training, real tokens per second"),
        ("publish", "publish a release, against one write and fsync of the same bytes"),
        ("receiver", "receiver, 16 clients"),
        ("anywhere", "four runners on one Postgres; a release to a follower elsewhere"),
        ("stream", "ten revisions: deltas against full trainings"),
        ("learning", "facts learned and kept: first commits, edits, deletions"),
        ("understood", "pushed answers, asked in other words"),
    ),
    "serving": _rows(
        ("real", "a pretrained model: tokens per second over HTTP, against vLLM's own server"),
        ("start", "start until the first token"),
        ("vllm-swap", "a swap on vLLM, against its own `reload_weights`"),
        ("swaps", "swaps under load, torch"),
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("table", choices=TABLES)
    names = [program.name for programs in TABLES.values() for program in programs]
    parser.add_argument("--rows", nargs="+", choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--small", action="store_true", help="sizes of the tests, not of a figure")
    parser.add_argument("--out", type=Path, default=ROOT / "bench-results")
    parser.add_argument("--limit-seconds", type=float, default=3 * 3600, help="of each row")
    asked = parser.parse_args()
    chosen = [p for p in TABLES[asked.table] if asked.rows is None or p.name in asked.rows]
    if not chosen:
        parser.error(f"{asked.table} has no row {', '.join(asked.rows)}")
    logs = asked.out / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    file = asked.out / f"{asked.table}.json"
    report = Report(
        machine=this_machine(), is_small=asked.small, rows=_kept_rows(file, asked.small)
    )
    order = [program.name for program in TABLES[asked.table]]
    failed = []
    for program in chosen:
        print(f"{program.name}: {program.what} …", flush=True)
        row = _run(program, asked.small, logs / f"{program.name}.log", asked.limit_seconds)
        kept = {each.name: each for each in (*report.rows, row)}
        rows = tuple(kept[name] for name in order if name in kept)
        report = report.model_copy(update={"rows": rows})
        _replace(file, report.model_dump_json(indent=2))
        _replace(file.with_suffix(".md"), markdown(report))
        if row.result is None:
            failed.append(program.name)
            print(
                f"  failed after {row.seconds:.0f} s, see {logs / f'{program.name}.log'}",
                flush=True,
            )
        else:
            print(f"  {row.seconds:.0f} s", flush=True)
    print(f"\n{markdown(report)}\nwritten to {file}")
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _run(program: Program, small: bool, log: Path, limit_seconds: float) -> Row:
    load = os.getloadavg()
    started, started_at = time.perf_counter(), datetime.now(UTC)
    answer = log.with_suffix(".json")
    answer.unlink(missing_ok=True)
    command = [sys.executable, "-m", program.module, "--json", str(answer)]
    if small:
        command.append("--small")
    error = None
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=stream,
            stderr=stream,
            start_new_session=True,
            preexec_fn=end_with_this_process,
        )
        try:
            code = process.wait(limit_seconds)
            error = f"exit code {code}" if code else None
        except subprocess.TimeoutExpired:
            error = f"no end in {limit_seconds:g} s"
        finally:
            _end(process)
    result = None
    if error is None:
        result = Result.model_validate_json(answer.read_bytes())
    else:
        said = log.read_text(errors="replace")
        error = f"{said[-ERROR_CHARACTERS:].rstrip()}\n{error}"
    answer.unlink(missing_ok=True)
    return Row(
        name=program.name,
        what=program.what,
        code=code_revision(),
        started_at=started_at.isoformat(timespec="seconds"),
        load_at_start=load,
        seconds=time.perf_counter() - started,
        result=result,
        error=error,
    )


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Whatever of its session is left, too: a program that fails may leave servers behind."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _kept_rows(file: Path, is_small: bool) -> tuple[Row, ...]:
    """Of an earlier call at the same size."""
    if not file.exists():
        return ()
    before = Report.model_validate_json(file.read_bytes())
    return before.rows if before.is_small == is_small else ()


def _replace(file: Path, text: str) -> None:
    draft = file.with_name(f".{file.name}")
    draft.write_text(text)
    draft.replace(file)


if __name__ == "__main__":
    sys.exit(main())
