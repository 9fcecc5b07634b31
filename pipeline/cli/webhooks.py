"""`pipeline webhooks`: manages the webhooks of a hub, lists their deliveries, sends a delivery
again, and sends a test event.

The commands about deliveries use routes that the Hugging Face Hub does not have. The Hugging Face
Hub shows deliveries only on its web pages.
"""

import json
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Literal

import typer

from pipeline.cli.terminal import ChangesStack, JsonOption, QuietOption, print_table, project_home
from pipeline.errors import PipelineError
from pipeline.paths import Home
from pipeline.retrain.sources import own_token
from pipeline.stack.record import running_settings
from pipeline.tokens import load_tokens, read_tokens
from receiver.webhooks import (
    WebhookRecord,
    call_hub,
    create_webhook,
    delete_webhook,
    disable_webhook,
    enable_webhook,
    get_webhook,
    list_webhooks,
    update_webhook,
)

app = typer.Typer(help="Manage the webhooks of a hub.", no_args_is_help=True)

WAIT_SECONDS = 30.0
"""`test` waits at most this long for the hub's attempt to deliver the test event. By default, an
attempt takes at most 15 s."""

WebhookArgument = Annotated[str, typer.Argument(help="The id of a webhook, from `webhooks ls`.")]
EndpointOption = Annotated[
    str | None,
    typer.Option(
        help="The URL of another hub. It gets your own token: HF_TOKEN, or that of `hf auth login`."
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
        help="TYPE is model, dataset, space, org or user. May be repeated.",
    ),
]
DomainOption = Annotated[
    list[str] | None, typer.Option("--domain", help="repo or discussion. May be repeated.")
]
SecretOption = Annotated[str | None, typer.Option(help="The secret that each delivery carries.")]


@app.command()
def ls(
    endpoint: EndpointOption = None, as_json: JsonOption = False, quiet: QuietOption = False
) -> None:
    """List webhooks."""
    webhooks = list_webhooks(**hub_access(endpoint))
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
    _print_list(list(map(_as_json, webhooks)), headings, rows, "No webhook yet.", as_json, quiet)
    # Print the warnings to standard error, because scripts read the standard output. `create` and
    # `update` need not print warnings: the Hub's client does so itself.
    if not (as_json or quiet):
        for webhook in webhooks:
            for warning in webhook.warnings:
                print(f"{webhook.id}: {warning}", file=sys.stderr)


@app.command()
def info(
    webhook_id: WebhookArgument,
    endpoint: EndpointOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Print one webhook, always as JSON."""
    webhook = get_webhook(webhook_id, **hub_access(endpoint))
    print(webhook.id if quiet else json.dumps(_as_json(webhook), indent=2))


@app.command(cls=ChangesStack)
def create(
    watch: WatchOption = None,
    url: UrlOption = None,
    job_id: JobOption = None,
    domain: DomainOption = None,
    secret: SecretOption = None,
    endpoint: EndpointOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Create a webhook that posts to --url or starts a copy of the job --job-id.

    The hub sends --secret with each delivery. This proves to the receiver that the delivery comes
    from the hub.
    """
    with _errors_name_options():
        webhook = create_webhook(
            url=url,
            job_id=job_id,
            watched=watch or (),
            domains=domain,
            secret=secret,
            **hub_access(endpoint),
        )
    _report("created", webhook, as_json, quiet)


@app.command(cls=ChangesStack)
def update(
    webhook_id: WebhookArgument,
    watch: WatchOption = None,
    url: UrlOption = None,
    job_id: JobOption = None,
    domain: DomainOption = None,
    secret: SecretOption = None,
    endpoint: EndpointOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Change a webhook. If you give no option for a property, this property stays as it is."""
    with _errors_name_options():
        webhook = update_webhook(
            webhook_id,
            url=url,
            job_id=job_id,
            watched=watch,
            domains=domain,
            secret=secret,
            **hub_access(endpoint),
        )
    _report("updated", webhook, as_json, quiet)


@app.command(cls=ChangesStack)
def enable(
    webhook_id: WebhookArgument,
    endpoint: EndpointOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Enable a webhook that is disabled, or that the hub has suspended after failures."""
    _report("enabled", enable_webhook(webhook_id, **hub_access(endpoint)), as_json, quiet)


@app.command(cls=ChangesStack)
def disable(
    webhook_id: WebhookArgument,
    endpoint: EndpointOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Disable a webhook. The hub keeps it, but delivers nothing until you enable it."""
    _report("disabled", disable_webhook(webhook_id, **hub_access(endpoint)), as_json, quiet)


@app.command(cls=ChangesStack)
def delete(
    webhook_id: WebhookArgument,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    endpoint: EndpointOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Delete a webhook for good."""
    if not yes and (as_json or quiet):
        raise PipelineError("--json and --quiet cannot ask for confirmation; add --yes to delete")
    if not yes:
        typer.confirm(f"Are you sure you want to delete webhook '{webhook_id}'?", abort=True)
    delete_webhook(webhook_id, **hub_access(endpoint))
    _print({"id": webhook_id}, f"Webhook {webhook_id} is deleted", as_json, quiet)


@app.command()
def deliveries(
    webhook_id: Annotated[
        str | None, typer.Argument(help="List only deliveries of this webhook.")
    ] = None,
    status: Annotated[
        Literal["pending", "delivered", "dead"] | None,
        typer.Option(help="Only with this status; `dead` is given up."),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="How many deliveries to list.")] = 20,
    endpoint: EndpointOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """List deliveries, newest first. Each line shows the status of a delivery and the answer of the
    receiver."""
    path = "deliveries" if webhook_id is None else f"webhooks/{webhook_id}/deliveries"
    wanted = {"limit": str(limit)} | ({} if status is None else {"status": status})
    found = on_hub("GET", path, wanted, endpoint)
    rows = [
        (
            one["id"],
            one["status"],
            f"{one['scope']} {one['action']} {one['repository']}",
            str(one["attempt"]),
            "" if one["milliseconds"] is None else f"{one['milliseconds']:.0f}",
            _answer(one),
        )
        for one in found
    ]
    headings = ("delivery", "status", "event", "attempts", "ms", "answer")
    empty = "No delivery." if status is None else f"No {status} delivery."
    _print_list(found, headings, rows, empty, as_json, quiet)


@app.command(cls=ChangesStack)
def replay(
    delivery_id: Annotated[str, typer.Argument(help="The id of a delivery.")],
    force: Annotated[
        bool, typer.Option("--force", help="Send it under a new id, so that it is handled again.")
    ] = False,
    endpoint: EndpointOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Send a delivery again, to the URL that the webhook has now.

    Without --force, the delivery keeps its id. So if the receiver has already handled the delivery,
    the receiver normally only repeats its first answer. The stack's own receiver makes exceptions.
    If it ignored the delivery at first, it handles the delivery like a new one. If no pipeline
    follows the branch any more, it ignores the delivery.

    If the delivery's job failed or was cancelled, the stack's own receiver answers with the job of
    the pipeline that waits for pushes. If there is none, it submits a new job.
    """
    path = f"deliveries/{delivery_id}/replay"
    sent = on_hub("POST", path, {"force": "1"} if force else {}, endpoint)["delivery"]
    text = f"Delivery {delivery_id} is sent again" + (f" as {sent['id']}" if force else "")
    _print(sent, text, as_json, quiet)


@app.command(cls=ChangesStack)
def test(
    webhook_id: WebhookArgument,
    endpoint: EndpointOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Send a test event, which starts no job, and wait for the receiver's answer.

    The exit code is 1 if the status of the answer is not 2xx, or if there is no answer.
    """
    sent = on_hub("POST", f"webhooks/{webhook_id}/test", endpoint=endpoint)["delivery"]
    deadline = time.monotonic() + WAIT_SECONDS
    while sent["last_attempt_at"] is None and time.monotonic() < deadline:
        time.sleep(0.05)
        sent = on_hub("GET", f"deliveries/{sent['id']}", endpoint=endpoint)["delivery"]
    waiting = "no attempt has ended yet; the hub may be busy with other deliveries"
    _print(sent, f"Webhook {webhook_id}: {_answer(sent) or waiting}", as_json, quiet)
    if sent["status"] != "delivered":
        raise typer.Exit(1)


def _print_list(
    found: Sequence[Mapping[str, Any]],
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    empty: str,
    as_json: bool,
    quiet: bool,
) -> None:
    if as_json:
        print(json.dumps(found))
    elif quiet:
        print("".join(f"{one['id']}\n" for one in found), end="")
    else:
        print_table(headings, rows, empty=empty)


def _answer(delivery: dict[str, Any]) -> str:
    if delivery["error"]:
        return str(delivery["error"])
    if delivery["response_status"] is None:
        return ""
    return f"{delivery['response_status']} {delivery['response_head'] or ''}".strip()


def hub_access(endpoint: str | None) -> dict[str, Any]:
    """The address of a hub, and the token for this hub. If `endpoint` is None, the hub is the
    stack's own hub. Another hub gets the user's own token, or none (False): the client library
    would otherwise send it HF_TOKEN, which may be the token of this stack."""
    if endpoint is not None:
        file = Home.find().tokens_file
        stack_token = read_tokens(file).hub if file.exists() else ""
        own = own_token(os.environ, stack_token) or False
        return {"endpoint": endpoint.rstrip("/"), "token": own}
    home = project_home()
    token = load_tokens(home.tokens_file).hub
    return {"endpoint": running_settings(home).hub_url, "token": token}


def on_hub(
    method: Literal["GET", "POST", "DELETE"],
    path: str,
    query: Mapping[str, str] | None = None,
    endpoint: str | None = None,
) -> Any:
    return call_hub(method, path, **hub_access(endpoint), query=query)


@contextmanager
def _errors_name_options() -> Iterator[None]:
    """Turn a ValueError into a PipelineError. The message of the ValueError names arguments of a
    Python function; the new message names the options of the command instead."""
    options = {"url": "--url", "job_id": "--job-id", "watched": "--watch"}
    try:
        yield
    except ValueError as error:
        words = re.sub(r"`(\w+)`", lambda name: options.get(name[1], name[0]), str(error))
        raise PipelineError(words) from None


def _as_json(webhook: WebhookRecord) -> Mapping[str, Any]:
    return webhook.model_dump(mode="json", exclude={"secret"})


def _report(verb: str, webhook: WebhookRecord, as_json: bool, quiet: bool) -> None:
    _print(_as_json(webhook), f"Webhook {webhook.id} is {verb}", as_json, quiet)


def _print(found: Mapping[str, Any], text: str, as_json: bool, quiet: bool) -> None:
    print(json.dumps(found) if as_json else found["id"] if quiet else text)
