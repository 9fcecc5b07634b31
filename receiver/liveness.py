"""`GET /live` of a receiver that starts jobs: the proof that it does not hang."""

from fastapi import FastAPI

from jobs.errors import StoreError
from jobs.store import JobStore


def add_live_route(app: FastAPI, store: JobStore) -> None:
    """Serve `/live`, which answers once the job store was read. Call this before the app serves.

    An error of the store is an answer too, because starting the receiver again repairs no database.
    """

    @app.get("/live")
    def alive() -> dict[str, str]:
        try:
            store.list(limit=1)
        except StoreError as error:
            return {"status": "ok", "database": str(error)}
        return {"status": "ok"}
