"""`pipeline webhooks deliveries | replay | test`: lists deliveries, sends a delivery again, and
sends a test event.

These commands use routes that the Hugging Face Hub does not have. The Hugging Face Hub shows
deliveries only on its web pages.
"""

import json
import time
from typing import Annotated, Any, Literal

import typer

from pipeline.cli.hub_calls import call_hub
from pipeline.cli.options import JsonOption, QuietOption
from pipeline.cli.tables import print_table
from pipeline.cli.webhook_commands import EndpointOption, WebhookArgument

WAIT_SECONDS = 30.0
"""`test` waits at most this long for the hub's attempt to deliver the test event. By default, an
attempt takes at most 15 s."""

DeliveryArgument = Annotated[
    str, typer.Argument(help="The id of a delivery, from `webhooks deliveries`.")
]
StatusOption = Annotated[
    Literal["pending", "delivered", "dead"] | None,
    typer.Option(
        help="List only deliveries with this status. `dead`: the hub has given up sending."
    ),
]


def add_to(app: typer.Typer) -> None:
    """Add these commands to the command group `webhooks`."""
    for command in (deliveries, replay, test):
        app.command()(command)


def deliveries(
    webhook_id: Annotated[
        str | None, typer.Argument(help="List only deliveries of this webhook.")
    ] = None,
    status: StatusOption = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="How many deliveries to list.")] = 20,
    endpoint: EndpointOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """List deliveries, newest first. Each line shows the status of a delivery and the answer of the
    receiver."""
    path = "deliveries" if webhook_id is None else f"webhooks/{webhook_id}/deliveries"
    wanted = {"limit": str(limit)} | ({} if status is None else {"status": status})
    found = call_hub("GET", path, endpoint, wanted)
    if as_json:
        print(json.dumps(found))
    elif quiet:
        print("".join(f"{one['id']}\n" for one in found), end="")
    else:
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
        print_table(headings, rows, empty=empty)


def replay(
    delivery_id: DeliveryArgument,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Send the delivery under a new id, so that the receiver handles it again.",
        ),
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

    If the delivery's job failed or was cancelled, the stack's own receiver looks for later jobs of
    the pipeline that pushes started, and that neither failed nor were cancelled. It answers with
    the id of the newest of these jobs. If there is none, it submits a new job.
    """
    path = f"deliveries/{delivery_id}/replay"
    sent = call_hub("POST", path, endpoint, {"force": "1"} if force else {})["delivery"]
    if as_json:
        print(json.dumps(sent))
    elif quiet:
        print(sent["id"])
    else:
        print(f"Delivery {delivery_id} is sent again" + (f" as {sent['id']}" if force else ""))


def test(
    webhook_id: WebhookArgument,
    endpoint: EndpointOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Send a test event, which starts no job, and wait for the receiver's answer.

    The exit code is 1 if the status of the answer is not 2xx, or if there is no answer.
    """
    sent = call_hub("POST", f"webhooks/{webhook_id}/test", endpoint, {})["delivery"]
    deadline = time.monotonic() + WAIT_SECONDS
    while sent["last_attempt_at"] is None and time.monotonic() < deadline:
        time.sleep(0.05)
        sent = call_hub("GET", f"deliveries/{sent['id']}", endpoint, {})["delivery"]
    if as_json:
        print(json.dumps(sent))
    elif quiet:
        print(sent["id"])
    else:
        waiting = "no attempt has ended yet; the hub may be busy with other deliveries"
        print(f"Webhook {webhook_id}: {_answer(sent) or waiting}")
    if sent["status"] != "delivered":
        raise typer.Exit(1)


def _answer(delivery: dict[str, Any]) -> str:
    if delivery["error"]:
        return str(delivery["error"])
    if delivery["response_status"] is None:
        return ""
    return f"{delivery['response_status']} {delivery['response_head'] or ''}".strip()
