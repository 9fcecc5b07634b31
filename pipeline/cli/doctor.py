"""`pipeline doctor`: what is wrong, and what to do."""

import json

import typer

from pipeline.cli.options import JsonOption
from pipeline.paths import Home


def doctor(
    as_json: JsonOption = False,
) -> None:
    """Look for what is wrong and say what to do; exit code 1 for any finding."""
    from pipeline.doctor import examine
    from pipeline.settings import load_settings

    findings = examine(Home.find(), load_settings())
    if as_json:
        print(json.dumps([finding.model_dump() for finding in findings]))
    else:
        for finding in findings:
            print(f"{finding.level:5}  {finding.check}: {finding.message}")
            if finding.next_step is not None:
                print(f"       → {finding.next_step}")
    if any(finding.level == "wrong" for finding in findings):
        raise typer.Exit(1)
