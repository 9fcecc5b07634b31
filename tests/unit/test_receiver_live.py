"""`/live` of the receiver goes through its job store."""

from pathlib import Path

from fastapi import FastAPI
from fastapi.testclient import TestClient

from jobs.store import JobStore
from receiver.webhooks_server import add_live_route


def test_it_answers_with_and_without_a_store_that_can_be_read(tmp_path: Path) -> None:
    app = FastAPI()
    with JobStore.open(tmp_path / "jobs.sqlite") as store, TestClient(app) as client:
        add_live_route(app, store)
        assert client.get("/live").json() == {"status": "ok"}
        for file in tmp_path.iterdir():
            file.write_bytes(b"no database")
        answer = client.get("/live")
        assert answer.status_code == 200  # a new start would not help
        assert "jobs.sqlite failed" in answer.json()["database"]
