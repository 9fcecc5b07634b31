"""`pipeline webhooks deliveries | replay | test`: what webhooks were sent, and sending it again.

Over the embedded hub's own routes; the Hugging Face Hub shows the same on its pages only.
"""

import json
import time
from typing import Annotated, Any, Literal

import typer

from pipeline.cli.options import JsonOption, QuietOption
from pipeline.cli.tables import print_table
from pipeline.cli.webhooks import EndpointOption, WebhookArgument, hub
from pipeline.errors import PipelineError

WAIT_SECONDS = 30.0
"""How long `test` waits for an attempt to end; the hub gives up on one before."""

DeliveryArgument = Annotated[
    str, typer.Argument(help="A delivery's id, as `webhooks deliveries` shows it.")
]
StatusOption = Annotated[
    Literal["pending", "delivered", "dead"] | None, typer.Option(help="Those in this state only.")
]


def add_to(app: typer.Typer) -> None:
    """Makes these commands members of the group `webhooks`."""
    for command in (deliveries, replay, test):
        app.command()(command)


def deliveries(
    webhook_id: Annotated[
        str | None, typer.Argument(help="Of this webhook; of all without it.")
    ] = None,
    status: StatusOption = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="How many, newest first.")] = 20,
    endpoint: EndpointOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """List what was sent and how that ended, newest first."""
    path = "deliveries" if webhook_id is None else f"webhooks/{webhook_id}/deliveries"
    wanted = {"limit": str(limit)} | ({} if status is None else {"status": status})
    found = _call("GET", path, endpoint, wanted)
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
                one["next_attempt_at"] or "",
                _answer(one),
            )
            for one in found
        ]
        headings = ("delivery", "status", "event", "attempts", "ms", "next attempt", "answer")
        empty = "Nothing was sent yet." if status is None else f"No {status} delivery."
        print_table(headings, rows, empty=empty)


def replay(
    delivery_id: DeliveryArgument,
    force: Annotated[
        bool, typer.Option("--force", help="Under a new id, so that the work is done again.")
    ] = False,
    endpoint: EndpointOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Send a delivery again, to the webhook's present URL.

    Under its old id, so that a receiver that did the work answers with the first result.
    """
    path = f"deliveries/{delivery_id}/replay"
    sent = _call("POST", path, endpoint, {"force": "1"} if force else {})["delivery"]
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
    """Send an event that nothing needs to be done about, and wait for the answer.

    The exit code is 1 where the answer is not 2xx, or where there is none.
    """
    sent = _call("POST", f"webhooks/{webhook_id}/test", endpoint, {})["delivery"]
    deadline = time.monotonic() + WAIT_SECONDS
    while sent["last_attempt_at"] is None and time.monotonic() < deadline:
        time.sleep(0.05)
        sent = _call("GET", f"deliveries/{sent['id']}", endpoint, {})["delivery"]
    if as_json:
        print(json.dumps(sent))
    elif quiet:
        print(sent["id"])
    else:
        print(f"Webhook {webhook_id}: {_answer(sent) or 'other deliveries are before this one'}")
    if sent["status"] != "delivered":
        raise typer.Exit(1)


def _answer(delivery: dict[str, Any]) -> str:
    if delivery["error"]:
        return str(delivery["error"])
    if delivery["response_status"] is None:
        return ""
    return f"{delivery['response_status']} {delivery['response_head'] or ''}".strip()


def _call(method: str, path: str, endpoint: str | None, query: dict[str, str]) -> Any:
    """The JSON of the hub's answer. Raises PipelineError with the reason where there is none."""
    import os

    import httpx

    where = hub(endpoint)
    token = where["token"] or os.environ.get("HF_TOKEN")
    url = f"{where['endpoint'].rstrip('/')}/api/settings/{path}"
    try:
        answer = httpx.request(
            method,
            url,
            params=query,
            headers={"Authorization": f"Bearer {token}"} if token else {},
            timeout=30,
            trust_env=False,
        )
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise PipelineError(
            f"the hub at {where['endpoint']} cannot be reached ({error}); start it, or give "
            "another --endpoint"
        ) from None
    try:
        body = answer.json()
    except ValueError:
        body = None
    if answer.is_success and body is not None:
        return body
    reason = body.get("error") if isinstance(body, dict) else None
    raise PipelineError(
        f"the hub answered {answer.status_code}: {reason or 'it has no record of deliveries'}"
    )
