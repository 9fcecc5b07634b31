"""Options that several `pipeline` commands share."""

from typing import Annotated

import typer

PipelineOption = Annotated[
    str | None, typer.Option("--pipeline", help="The pipeline, if several are configured.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Print only ids.")]
