"""The route `GET /live` of a receiver that submits jobs. `pipeline up` requests this route again
and again. If there is no answer for some time, `pipeline up` restarts the receiver."""

from fastapi import FastAPI

from jobs.errors import StoreError
from jobs.store import JobStore


def add_live_route(app: FastAPI, store: JobStore) -> None:
    """Add the route `/live`, which reads the job store before it answers. Call this function before
    the app serves requests.

    If the store fails, the answer has status 200 and names the error. If the answer had status 503,
    `pipeline up` would restart the receiver, but a restart does not repair a database.
    """

    @app.get("/live")
    def alive() -> dict[str, str]:
        try:
            store.list(limit=1)
        except StoreError as error:
            return {"status": "ok", "database": str(error)}
        return {"status": "ok"}
