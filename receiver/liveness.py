"""`GET /live` of a receiver that submits jobs. An answer shows that the receiver does not hang."""

from fastapi import FastAPI

from jobs.errors import StoreError
from jobs.store import JobStore


def add_live_route(app: FastAPI, store: JobStore) -> None:
    """Serve `/live`, which answers once the job store was read. Call this before the app serves.

    If the store fails, the answer names the error, but its status is still 200: a restart of the
    receiver would not repair the database.
    """

    @app.get("/live")
    def alive() -> dict[str, str]:
        try:
            store.list(limit=1)
        except StoreError as error:
            return {"status": "ok", "database": str(error)}
        return {"status": "ok"}
