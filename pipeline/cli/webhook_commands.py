"""`pipeline webhooks`: creates, lists, shows, changes, enables, disables and deletes the webhooks
of a hub."""

import io
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

import typer

from pipeline.cli.options import JsonOption, QuietOption
from pipeline.cli.project import project_home
from pipeline.cli.tables import print_table
from pipeline.errors import PipelineError

if TYPE_CHECKING:
    from receiver.webhooks import Domain, WebhookRecord

app = typer.Typer(help="Manage the webhooks of a hub.", no_args_is_help=True)

WebhookArgument = Annotated[str, typer.Argument(help="The id of a webhook, from `webhooks ls`.")]
EndpointOption = Annotated[
    str | None,
    typer.Option(
        help="The URL of another hub, such as https://huggingface.co. Set HF_TOKEN to a token of "
        "that other hub. Default: the stack's own hub."
    ),
]
UrlOption = Annotated[str | None, typer.Option(help="The hub posts each event to this URL.")]
JobOption = Annotated[
    str | None, typer.Option("--job-id", help="Each event starts a copy of this job.")
]
WatchOption = Annotated[
    list[str] | None,
    typer.Option(
        "--watch",
        metavar="TYPE:NAME",
        help="What to watch. TYPE is model, dataset, space, org or user. May be repeated.",
    ),
]
DomainOption = Annotated[
    list[str] | None,
    typer.Option("--domain", help="Which events to deliver: repo or discussion. May be repeated."),
]
SecretsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--secrets",
        metavar="NAME[=VALUE]",
        help="An environment variable for the copies of the job; the hub stores it encrypted. "
        "Without VALUE, the value comes from the variable NAME of this shell. May be repeated.",
    ),
]
SecretsFileOption = Annotated[
    str | None,
    typer.Option(
        help="A file with environment variables for the copies of the job: NAME=VALUE on each "
        "line, as for docker --env-file. With -, the lines are read from stdin."
    ),
]
SecretOption = Annotated[
    str | None,
    typer.Option(
        help="A secret that the hub sends with each delivery. The secret proves to the receiver "
        "that the delivery comes from the hub."
    ),
]


@app.command()
def ls(
    endpoint: EndpointOption = None, as_json: JsonOption = False, quiet: QuietOption = False
) -> None:
    """List webhooks."""
    from receiver.webhooks import list_webhooks

    webhooks = list_webhooks(**hub_access(endpoint))
    if as_json:
        print(json.dumps([_as_json(webhook) for webhook in webhooks]))
    elif quiet:
        print("".join(f"{webhook.id}\n" for webhook in webhooks), end="")
    else:
        rows = [
            (
                webhook.id,
                webhook.status,
                webhook.url or "(job)",
                " ".join(map(str, webhook.watched)),
                " ".join(webhook.domains),
            )
            for webhook in webhooks
        ]
        headings = ("id", "status", "url", "watched", "domains")
        print_table(headings, rows, empty="No webhook yet.")
        # Print the warnings to standard error, because scripts read the standard output. `create`
        # and `update` need not print warnings: the Hub's client does so itself.
        for webhook in webhooks:
            for warning in webhook.warnings:
                print(f"{webhook.id}: {warning}", file=sys.stderr)


@app.command()
def info(
    webhook_id: WebhookArgument,
    endpoint: EndpointOption = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="No effect: the output is always JSON.")
    ] = False,
    quiet: QuietOption = False,
) -> None:
    """Print one webhook as JSON."""
    from receiver.webhooks import get_webhook

    webhook = get_webhook(webhook_id, **hub_access(endpoint))
    print(webhook.id if quiet else json.dumps(_as_json(webhook), indent=2))


@app.command()
def create(
    watch: WatchOption = None,
    url: UrlOption = None,
    job_id: JobOption = None,
    domain: DomainOption = None,
    secret: SecretOption = None,
    secrets: SecretsOption = None,
    secrets_file: SecretsFileOption = None,
    endpoint: EndpointOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Create a webhook that posts to --url or starts a copy of the job --job-id."""
    from receiver.webhooks import create_webhook

    given = _given(url, job_id, domain, secret, secrets, secrets_file)
    with _errors_name_options():
        webhook = create_webhook(watched=watch or (), **given, **hub_access(endpoint))
    _report("created", webhook, as_json, quiet)


@app.command()
def update(
    webhook_id: WebhookArgument,
    watch: WatchOption = None,
    url: UrlOption = None,
    job_id: JobOption = None,
    domain: DomainOption = None,
    secret: SecretOption = None,
    secrets: SecretsOption = None,
    secrets_file: SecretsFileOption = None,
    endpoint: EndpointOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Change a webhook. If you give no option for a property, this property stays as it is."""
    from receiver.webhooks import update_webhook

    given = _given(url, job_id, domain, secret, secrets, secrets_file)
    with _errors_name_options():
        webhook = update_webhook(webhook_id, watched=watch, **given, **hub_access(endpoint))
    _report("updated", webhook, as_json, quiet)


@app.command()
def enable(
    webhook_id: WebhookArgument,
    endpoint: EndpointOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Enable a webhook that is disabled, or that the hub has suspended after failures."""
    from receiver.webhooks import enable_webhook

    _report("enabled", enable_webhook(webhook_id, **hub_access(endpoint)), as_json, quiet)


@app.command()
def disable(
    webhook_id: WebhookArgument,
    endpoint: EndpointOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Disable a webhook. The hub keeps it, but delivers nothing until you enable it."""
    from receiver.webhooks import disable_webhook

    _report("disabled", disable_webhook(webhook_id, **hub_access(endpoint)), as_json, quiet)


@app.command()
def delete(
    webhook_id: WebhookArgument,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    endpoint: EndpointOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Delete a webhook for good."""
    from receiver.webhooks import delete_webhook

    if not yes and (as_json or quiet):
        raise PipelineError("--json and --quiet cannot ask for confirmation; add --yes to delete")
    if not yes:
        typer.confirm(f"Are you sure you want to delete webhook '{webhook_id}'?", abort=True)
    delete_webhook(webhook_id, **hub_access(endpoint))
    if as_json:
        print(json.dumps({"id": webhook_id}))
    else:
        print(webhook_id if quiet else f"Webhook {webhook_id} is deleted")


class HubAccess(TypedDict):
    endpoint: str
    token: str | None


def hub_access(endpoint: str | None) -> HubAccess:
    """The address of a hub, and the token for this hub. If `endpoint` is None, the hub is the
    stack's own hub. For another hub, the token is None. The client library then looks for a token
    itself, for example in HF_TOKEN."""
    if endpoint is not None:
        return {"endpoint": endpoint, "token": None}
    from pipeline.stack_record import running_settings
    from pipeline.tokens import load_tokens

    home = project_home()
    token = load_tokens(home.tokens_file).hub
    return {"endpoint": running_settings(home).hub_url, "token": token}


class _Given(TypedDict):
    """The options that `create` and `update` share."""

    url: str | None
    job_id: str | None
    domains: "list[Domain] | None"
    secret: str | None
    secrets: dict[str, str] | None


def _given(
    url: str | None,
    job_id: str | None,
    domain: list[str] | None,
    secret: str | None,
    secrets: list[str] | None,
    secrets_file: str | None,
) -> _Given:
    return {
        "url": url,
        "job_id": job_id,
        "domains": _domains(domain),
        "secret": secret,
        "secrets": _secrets(secrets, secrets_file),
    }


def _domains(given: list[str] | None) -> Any:
    from typing import get_args

    from receiver.webhooks import Domain

    for domain in given or ():
        if domain not in get_args(Domain):
            known = ", ".join(get_args(Domain))
            raise PipelineError(f"--domain {domain!r} is not one of {known}")
    return given


def secrets_in(file: str, option: str) -> dict[str, str]:
    """The variables in `file`, with their values. If a line has only the name of a variable, the
    value comes from this shell. Raises PipelineError if the shell has no such variable. `option` is
    the command's option that names the file; error messages show this option."""
    return _with_values(_lines_of(file, option))


def _secrets(given: list[str] | None, file: str | None) -> dict[str, str] | None:
    """The variables that `--secrets` and the file of `--secrets-file` set; None if neither option
    is given. If both set the same variable, `--secrets` wins."""
    if given is None and file is None:
        return None
    named = {} if file is None else _lines_of(file)
    for text in given or ():
        name, equals, value = text.partition("=")
        named[name] = value if equals else None
    return _with_values(named)


def _with_values(named: Mapping[str, str | None]) -> dict[str, str]:
    found = {}
    for name, given_value in named.items():
        secret = os.environ.get(name) if given_value is None else given_value
        if secret is None:
            raise PipelineError(
                f"the secret {name} has no value; export {name} in this shell, or write {name}=…"
            )
        found[name] = secret
    return found


def _lines_of(file: str, option: str = "--secrets-file") -> dict[str, str | None]:
    """Reads the file (`-` is standard input); returns name → value. The value is None if the line
    has only a name. `option` is the command's option that names the file; error messages show this
    option."""
    from dotenv.parser import parse_stream

    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise PipelineError(f"{option} {file} cannot be read: {error}") from None
    found = {}
    for line in parse_stream(io.StringIO(text)):
        if line.error:
            raise PipelineError(
                f"{option} {file}: line {line.original.line} is neither NAME=VALUE nor NAME"
            )
        if line.key is not None:
            found[line.key] = line.value
    return found


@contextmanager
def _errors_name_options() -> Iterator[None]:
    """Turn a ValueError into a PipelineError. The message of the ValueError names arguments of a
    Python function; the new message names the options of the command instead."""
    options = {"url": "--url", "job_id": "--job-id", "watched": "--watch", "secrets": "--secrets"}
    try:
        yield
    except ValueError as error:
        words = re.sub(r"`(\w+)`", lambda name: options.get(name[1], name[0]), str(error))
        raise PipelineError(words) from None


def _as_json(webhook: "WebhookRecord") -> Mapping[str, Any]:
    return webhook.model_dump(mode="json", exclude={"secret"})


def _report(verb: str, webhook: "WebhookRecord", as_json: bool, quiet: bool) -> None:
    if as_json:
        print(json.dumps(_as_json(webhook)))
    else:
        print(webhook.id if quiet else f"Webhook {webhook.id} is {verb}")
