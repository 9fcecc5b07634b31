"""`pipeline webhooks`: create, list, show, change, enable, disable and delete them on a hub."""

import json
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

import typer

from pipeline.cli.options import JsonOption, QuietOption
from pipeline.cli.tables import print_table
from pipeline.errors import PipelineError
from pipeline.paths import Home

if TYPE_CHECKING:
    from receiver.webhooks import WebhookRecord

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
) -> None:
    """Print one webhook as JSON."""
    from receiver.webhooks import get_webhook

    print(json.dumps(_as_json(get_webhook(webhook_id, **hub(endpoint))), indent=2))


@app.command()
def create(
    watch: WatchOption = None,
    url: UrlOption = None,
    job_id: JobOption = None,
    domain: DomainOption = None,
    secret: SecretOption = None,
    secrets: SecretsOption = None,
    endpoint: EndpointOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Create a webhook that posts to --url, or starts a copy of --job-id."""
    from receiver.webhooks import create_webhook

    webhook = _checked(
        lambda: create_webhook(
            url=url,
            job_id=job_id,
            watched=watch or (),
            domains=_domains(domain),
            secret=secret,
            secrets=_secrets(secrets),
            **hub(endpoint),
        )
    )
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
    endpoint: EndpointOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Change what is given, leave the rest."""
    from receiver.webhooks import update_webhook

    webhook = _checked(
        lambda: update_webhook(
            webhook_id,
            url=url,
            job_id=job_id,
            watched=watch,
            domains=_domains(domain),
            secret=secret,
            secrets=_secrets(secrets),
            **hub(endpoint),
        )
    )
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


def _domains(given: list[str] | None) -> Any:
    from typing import get_args

    from receiver.webhooks import Domain

    for domain in given or ():
        if domain not in get_args(Domain):
            known = ", ".join(get_args(Domain))
            raise PipelineError(f"--domain {domain!r} is not one of {known}")
    return given


def _secrets(given: list[str] | None) -> dict[str, str] | None:
    if given is None:
        return None
    found = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals and name not in os.environ:
            raise PipelineError(f"--secrets {name} has no value here: export it, or give {name}=…")
        found[name] = value if equals else os.environ[name]
    return found


def _checked(call: "Callable[[], WebhookRecord]") -> "WebhookRecord":
    try:
        return call()
    except ValueError as error:
        # Arguments that contradict each other; the message names them.
        raise PipelineError(str(error)) from None


def _as_json(webhook: "WebhookRecord") -> Mapping[str, Any]:
    return webhook.model_dump(mode="json", exclude={"secret"})


def _report(verb: str, webhook: "WebhookRecord", as_json: bool, quiet: bool) -> None:
    if as_json:
        print(json.dumps(_as_json(webhook)))
    else:
        print(webhook.id if quiet else f"Webhook {webhook.id} is {verb}")
