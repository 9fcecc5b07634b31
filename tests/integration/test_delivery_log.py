"""The file of a receiver's deliveries: what it keeps and forgets, and whose it is."""

import contextlib
import shutil
import sqlite3
from pathlib import Path

import pytest

from receiver.dead_letters import list_dead_letters, replay_dead_letters
from receiver.delivery_log import KEPT_SECONDS, DeliveryLog, HandlerResult, NewDelivery
from receiver.errors import ReceiverError
from tests.receiver_fixtures import no_secret_in_the_environment  # noqa: F401


def test_one_process_at_a_time(tmp_path: Path) -> None:
    with (
        contextlib.closing(DeliveryLog(tmp_path / "receiver.db")),
        pytest.raises(ReceiverError, match="Another receiver stores its deliveries"),
    ):
        DeliveryLog(tmp_path / "receiver.db")


def test_a_folder_that_cannot_be_made_is_an_error_for_a_person(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ReceiverError, match=r"Deliveries cannot be stored in .* folder writable"):
        DeliveryLog(tmp_path / "file" / "receiver.db")


def test_a_file_of_a_newer_release_or_of_another_program_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "receiver.db"
    DeliveryLog(path).close()
    with contextlib.closing(sqlite3.connect(path)) as database:
        assert database.execute("PRAGMA user_version").fetchone() == (2,)
        database.execute("PRAGMA user_version = 3")
    newer = path.read_bytes()
    for _ in range(2):
        with pytest.raises(ReceiverError, match=r"receiver\.db has schema 3.*Upgrade hotpush"):
            DeliveryLog(path)
    assert path.read_bytes() == newer
    path.write_text("not a database " * 100)
    with pytest.raises(ReceiverError, match=r"receiver\.db: file is not a database.*another file"):
        DeliveryLog(path)
    assert path.read_text() == "not a database " * 100


def test_a_file_from_before_the_first_version_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "receiver.db"
    delivery = NewDelivery(path="/x", id="d1", headers={}, body=b"{}")
    with contextlib.closing(DeliveryLog(path)) as log:
        log.add([delivery], now=1000.0)
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA user_version = 0")
    with contextlib.closing(DeliveryLog(path)) as log:
        assert [found.id for found in log.due(1000.0, ["/x"])] == ["d1"]


FIRST_VERSION = """
CREATE TABLE deliveries (
    path TEXT NOT NULL,
    id TEXT NOT NULL,
    headers TEXT NOT NULL,
    body BLOB NOT NULL,
    received_at REAL NOT NULL,
    attempts INTEGER NOT NULL DEFAULT 0,
    due_at REAL,
    PRIMARY KEY (path, id)
) STRICT;
CREATE INDEX deliveries_due ON deliveries (due_at) WHERE due_at IS NOT NULL;
INSERT INTO deliveries VALUES ('/x', 'd1', '{}', x'7b7d', 1000.0, 3, 1000.0);
PRAGMA user_version = 1;
"""


def test_a_file_of_the_first_version_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "receiver.db"
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.executescript(FIRST_VERSION)
    for _ in range(2):
        with contextlib.closing(DeliveryLog(path)) as log:
            (found,) = log.due(1000.0, ["/x"])
            assert (found.id, found.attempts, found.repository) == ("d1", 3, None)
    assert list_dead_letters(path) == []


def test_an_upgrade_that_fails_leaves_the_file_free(tmp_path: Path) -> None:
    path = tmp_path / "receiver.db"
    with contextlib.closing(sqlite3.connect(path, timeout=0)) as database:
        database.executescript(FIRST_VERSION + "CREATE TABLE deliveries_dead (id);")
        with pytest.raises(ReceiverError, match="Deliveries cannot be stored"):
            DeliveryLog(path)
        database.execute("DROP TABLE deliveries_dead")
    DeliveryLog(path).close()


def in_line(log: DeliveryLog, now: float, *busy: tuple[str, str]) -> list[str]:
    return [found.id for found in log.due(now, ["/x", "/y"], busy)]


def test_what_comes_after_a_failure_waits_and_what_is_elsewhere_does_not(tmp_path: Path) -> None:
    with contextlib.closing(DeliveryLog(tmp_path / "receiver.db")) as log:
        for place, (path, repository) in enumerate(
            [("/x", "a"), ("/x", "a"), ("/x", "b"), ("/y", "a"), ("/x", None), ("/x", None)]
        ):
            new = NewDelivery(
                path=path, id=f"d{place}", headers={}, body=b"{}", repository=repository
            )
            log.add([new], now=1000.0)
        assert in_line(log, 1000.0) == ["d0", "d1", "d2", "d3", "d4", "d5"]
        assert in_line(log, 1000.0, ("/x", "a"), ("/y", "b")) == ["d2", "d3", "d4", "d5"]
        again = {"due_at": 1010.0, "failure": "answered 500"}
        log.store_results([HandlerResult(path="/x", id=id, **again) for id in ("d0", "d4")])  # type: ignore[arg-type]
        assert in_line(log, 1009.0) == ["d2", "d3", "d5"]
        assert in_line(log, 1010.0) == ["d0", "d1", "d2", "d3", "d4", "d5"]
        # Given up: nothing waits for it any more.
        log.store_results([HandlerResult(path="/x", id="d0", died_at=1010.0, failure="no")])
        assert in_line(log, 1009.0) == ["d1", "d2", "d3", "d5"]


def test_what_is_due_is_found_in_steps_that_grow_with_it_and_no_faster(tmp_path: Path) -> None:
    """Steps of SQLite's machine, which are the same on every computer."""

    def steps(log: DeliveryLog, num_due: int) -> int:
        log.add(
            [
                NewDelivery(path="/x", id=f"{num_due}-{n}", headers={}, body=b"", repository="a")
                for n in range(num_due)
            ],
            now=1000.0,
        )
        found = 0

        def count() -> None:
            nonlocal found
            found += 1

        log._connection.set_progress_handler(count, 10)
        log.due(1000.0, ["/x"])
        log._connection.set_progress_handler(None, 0)
        return found

    with contextlib.closing(DeliveryLog(tmp_path / "few.db")) as few:
        few_steps = steps(few, 500)
    with contextlib.closing(DeliveryLog(tmp_path / "many.db")) as many:
        assert steps(many, 2000) < 6 * few_steps


def test_a_dead_letter_is_kept_whole_until_it_is_handled_or_old(tmp_path: Path) -> None:
    path = tmp_path / "receiver.db"
    letter = NewDelivery(path="/x", id="d1", headers={}, body=b'{"a": 1}', repository="dataset/a")
    died = HandlerResult(path="/x", id="d1", died_at=2000.0, failure="answered 500")
    with contextlib.closing(DeliveryLog(path)) as log:
        log.add([letter], now=1000.0)
        log.store_results([died])
        (listed,) = list_dead_letters(path)
        assert (listed.id, listed.repository, listed.body) == ("d1", "dataset/a", '{"a": 1}')
        assert (listed.attempts, listed.died_at, listed.failure) == (1, 2000.0, "answered 500")
        with pytest.raises(ReceiverError, match="'d2' is no dead letter"):
            replay_dead_letters(path, ["d1", "d2"], now=3000.0)
        assert in_line(log, 3000.0) == []
        assert replay_dead_letters(path, ["d1"], now=3000.0) == ["d1"]
        (again,) = log.due(3000.0, ["/x"])
        assert (again.body, again.attempts) == (b'{"a": 1}', 0)
        log.store_results([died])
        assert log.add([letter], now=4000.0) == [False], "it is known, and handled once more"
        assert in_line(log, 4000.0) == ["d1"]
        log.store_results([died])
        log.forget(2000.0 + KEPT_SECONDS)
        assert len(list_dead_letters(path)) == 1
        assert replay_dead_letters(path, None, now=5000.0) == ["d1"]
        log.store_results([HandlerResult(path="/x", id="d1")])
        assert list_dead_letters(path) == [] and in_line(log, 9000.0) == []
        log.add([NewDelivery(path="/x", id="d3", headers={}, body=b"{}")], now=1000.0)
        log.store_results([HandlerResult(path="/x", id="d3", died_at=2000.0, failure="no")])
        log.forget(2001.0 + KEPT_SECONDS)
        assert list_dead_letters(path) == []


def test_a_file_whose_first_writer_was_killed_is_begun_again(tmp_path: Path) -> None:
    path = tmp_path / "receiver.db"
    # Page 1 is written, and its journal still there: as a kill in the change to WAL leaves it.
    begun = tmp_path / "begun.db"
    with contextlib.closing(sqlite3.connect(begun, isolation_level=None)) as database:
        database.execute("PRAGMA cache_size = 1")
        database.execute("CREATE TABLE filler (content)")
        database.execute("BEGIN")
        database.executemany("INSERT INTO filler VALUES (zeroblob(9000))", [()] * 50)
        journal = Path(f"{begun}-journal")
        assert journal.stat().st_size > 512
        shutil.copy(begun, path)
        shutil.copy(journal, f"{path}-journal")
    delivery = NewDelivery(path="/x", id="d1", headers={}, body=b"{}")
    with contextlib.closing(DeliveryLog(path)) as log:
        log.add([delivery], now=1000.0)
        assert [found.id for found in log.due(1000.0, ["/x"])] == ["d1"]


def test_opening_a_file_that_is_begun_writes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "receiver.db"
    with contextlib.closing(DeliveryLog(path)) as log:
        log.add([NewDelivery(path="/x", id="d1", headers={}, body=b"{}")], now=1000.0)
    before = path.read_bytes()
    wal = Path(f"{path}-wal")
    with contextlib.closing(DeliveryLog(path)):
        assert path.read_bytes() == before
        assert not wal.exists() or wal.stat().st_size == 0


def test_the_log_keeps_no_proof_and_forgets_what_was_handled(tmp_path: Path) -> None:
    path = tmp_path / "receiver.db"
    with contextlib.closing(DeliveryLog(path)) as log:
        # Gitea and Forgejo send their signature under several names.
        signatures = dict.fromkeys(("x-forgejo-signature", "x-gogs-signature"), "s3cret")
        headers = {"x-webhook-secret": "s3cret", "webhook-id": "d1", **signatures}
        delivery = NewDelivery(path="/x", id="d1", headers=headers, body=b"private")
        assert log.add([delivery, delivery], now=1000.0) == [True, False]
        (delivery,) = log.due(1000.0, ["/x"])
        assert delivery.headers == {"webhook-id": "d1"}
        assert log.due(1000.0, ["/y"]) == [], "of another handler, or of none yet"
        log.store_results([HandlerResult(path="/x", id="d1", due_at=1010.0)])
        assert (log.due(1009.0, ["/x"]), log.next_due_at(1009.0)) == ([], 1010.0)
        (again,) = log.due(1010.0, ["/x"])
        assert again.attempts == 1
        log.store_results([HandlerResult(path="/x", id="d1", due_at=None)])
        assert log.next_due_at(1010.0) is None
        again = NewDelivery(path="/x", id="d1", headers={}, body=b"")
        assert log.add([again], now=1011.0) == [False], "it is known"
        log.forget(1000.0 + KEPT_SECONDS + 1)
        assert log.add([again], now=1012.0) == [False], "it came again, 11 seconds later"
        log.forget(1012.0 + KEPT_SECONDS + 1)
        assert log.add([again], now=1013.0) == [True], "it is not known any more"
    with contextlib.closing(sqlite3.connect(path)) as connection:
        assert "s3cret" not in "\n".join(connection.iterdump())
