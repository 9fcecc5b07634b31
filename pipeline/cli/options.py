"""Options that several `pipeline` commands share."""

from typing import Annotated, Any

import typer

PipelineOption = Annotated[
    str | None, typer.Option("--pipeline", help="The pipeline, if several are configured.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Print only ids.")]
HostOption = Annotated[
    str | None, typer.Option(help="The address to listen on. Overrides `host` in the settings.")
]
PortOption = Annotated[
    int | None, typer.Option(help="The port to listen on. Overrides `port` in the settings.")
]


def without_none(**options: Any) -> dict[str, Any]:
    """The options that were given."""
    return {name: value for name, value in options.items() if value is not None}
