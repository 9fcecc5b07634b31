"""`pipeline webhooks`: create, list, show, change, enable, disable and delete them on a hub."""

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
from pipeline.cli.tables import print_table
from pipeline.errors import PipelineError
from pipeline.paths import Home

if TYPE_CHECKING:
    from receiver.webhooks import Domain, WebhookRecord

app = typer.Typer(help="Manage the webhooks of a hub.", no_args_is_help=True)

WebhookArgument = Annotated[str, typer.Argument(help="A webhook's id, as `webhooks ls` shows it.")]
EndpointOption = Annotated[
    str | None, typer.Option(help="Another hub, as https://huggingface.co; its token is HF_TOKEN.")
]
UrlOption = Annotated[str | None, typer.Option(help="Where to post payloads.")]
JobOption = Annotated[str | None, typer.Option("--job-id", help="A job to start a copy of.")]
WatchOption = Annotated[
    list[str] | None,
    typer.Option(
        "--watch",
        metavar="TYPE:NAME",
        help="model, dataset, space, org or user, and its name; can be repeated.",
    ),
]
DomainOption = Annotated[
    list[str] | None, typer.Option("--domain", help="repo or discussion; can be repeated.")
]
SecretsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--secrets",
        metavar="NAME[=VALUE]",
        help="A variable of the job, kept encrypted; without a value, this environment's. Repeat.",
    ),
]
SecretsFileOption = Annotated[
    str | None,
    typer.Option(help="A file of such lines, as docker's --env-file; - is standard input."),
]
SecretOption = Annotated[str | None, typer.Option(help="What each delivery must prove to know.")]


@app.command()
def ls(
    endpoint: EndpointOption = None, as_json: JsonOption = False, quiet: QuietOption = False
) -> None:
    """List webhooks."""
    from receiver.webhooks import list_webhooks

    webhooks = list_webhooks(**hub(endpoint))
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


@app.command()
def info(
    webhook_id: WebhookArgument,
    endpoint: EndpointOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="As it is in any case.")] = False,
    quiet: QuietOption = False,
) -> None:
    """Print one webhook as JSON."""
    from receiver.webhooks import get_webhook

    webhook = get_webhook(webhook_id, **hub(endpoint))
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
    """Create a webhook that posts to --url, or starts a copy of --job-id."""
    from receiver.webhooks import create_webhook

    given = _given(url, job_id, domain, secret, secrets, secrets_file)
    with _in_options():
        webhook = create_webhook(watched=watch or (), **given, **hub(endpoint))
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
    """Change what is given, leave the rest."""
    from receiver.webhooks import update_webhook

    given = _given(url, job_id, domain, secret, secrets, secrets_file)
    with _in_options():
        webhook = update_webhook(webhook_id, watched=watch, **given, **hub(endpoint))
    _report("updated", webhook, as_json, quiet)


@app.command()
def enable(
    webhook_id: WebhookArgument,
    endpoint: EndpointOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Deliver again."""
    from receiver.webhooks import enable_webhook

    _report("enabled", enable_webhook(webhook_id, **hub(endpoint)), as_json, quiet)


@app.command()
def disable(
    webhook_id: WebhookArgument,
    endpoint: EndpointOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Keep the webhook, and deliver nothing until it is enabled."""
    from receiver.webhooks import disable_webhook

    _report("disabled", disable_webhook(webhook_id, **hub(endpoint)), as_json, quiet)


@app.command()
def delete(
    webhook_id: WebhookArgument,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    endpoint: EndpointOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Remove a webhook for good."""
    from receiver.webhooks import delete_webhook

    if not yes and (as_json or quiet):
        raise PipelineError("what is printed for a program cannot ask: add --yes to delete")
    if not yes:
        typer.confirm(f"Are you sure you want to delete webhook '{webhook_id}'?", abort=True)
    delete_webhook(webhook_id, **hub(endpoint))
    if as_json:
        print(json.dumps({"id": webhook_id}))
    else:
        print(webhook_id if quiet else f"Webhook {webhook_id} is deleted")


class Hub(TypedDict):
    endpoint: str
    token: str | None


def hub(endpoint: str | None) -> Hub:
    """The hub that the option names, with nothing but the environment's token; else our own."""
    if endpoint is not None:
        return {"endpoint": endpoint, "token": None}
    from pipeline.settings import load_settings
    from pipeline.tokens import load_tokens

    token = load_tokens(Home.find().tokens_file).hub
    return {"endpoint": load_settings().hub_url, "token": token}


class _Given(TypedDict):
    """What `create` and `update` are told alike."""

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


def _secrets(given: list[str] | None, file: str | None) -> dict[str, str] | None:
    """Of both, where an option overrules the file; None where neither is given."""
    if given is None and file is None:
        return None
    named = {} if file is None else _lines_of(file)
    for text in given or ():
        name, equals, value = text.partition("=")
        named[name] = value if equals else None
    found = {}
    for name, told in named.items():
        secret = os.environ.get(name) if told is None else told
        if secret is None:
            raise PipelineError(f"the secret {name} has no value here: export it, or give {name}=…")
        found[name] = secret
    return found


def _lines_of(file: str) -> dict[str, str | None]:
    """Names and values; None for a name alone."""
    from dotenv.parser import parse_stream

    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise PipelineError(f"--secrets-file {file} cannot be read: {error}") from None
    found = {}
    for line in parse_stream(io.StringIO(text)):
        if line.error:
            raise PipelineError(
                f"--secrets-file {file}: line {line.original.line} is neither NAME=VALUE nor NAME"
            )
        if line.key is not None:
            found[line.key] = line.value
    return found


@contextmanager
def _in_options() -> Iterator[None]:
    """Arguments that contradict each other, by the names that they have here."""
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
