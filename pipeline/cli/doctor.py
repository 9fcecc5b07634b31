"""`pipeline doctor`: prints what is wrong with a stack, and what to do about it."""

import json

import typer

from pipeline.cli.options import JsonOption
from pipeline.cli.project import project_home


def doctor(
    as_json: JsonOption = False,
) -> None:
    """Check the stack and its state folder. Report what is wrong and what to do about it. The exit
    code is 1 if anything is wrong."""
    from pipeline.doctor import examine
    from pipeline.facts import Facts
    from pipeline.stack_record import running_settings

    home = project_home()
    findings = examine(Facts(home, running_settings(home)))
    if as_json:
        print(json.dumps([finding.model_dump() for finding in findings]))
    else:
        for finding in findings:
            print(f"{finding.level:5}  {finding.check}: {finding.message}")
            if finding.next_step is not None:
                print(f"       → {finding.next_step}")
    if any(finding.level == "wrong" for finding in findings):
        raise typer.Exit(1)
