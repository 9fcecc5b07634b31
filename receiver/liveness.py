"""The route `GET /live` of a receiver that submits jobs. `pipeline up` requests it: a receiver that
does not answer hangs."""

from fastapi import FastAPI

from jobs.errors import StoreError
from jobs.store import JobStore


def add_live_route(app: FastAPI, store: JobStore) -> None:
    """Add the route `/live`, which reads the job store before it answers. Call this function before
    the app serves requests.

    If the store fails, the answer has status 200 and names the error. Any other answer would make
    `pipeline up` restart the receiver, and a restart does not repair a database.
    """

    @app.get("/live")
    def alive() -> dict[str, str]:
        try:
            store.list(limit=1)
        except StoreError as error:
            return {"status": "ok", "database": str(error)}
        return {"status": "ok"}
