"""A state folder whose disk is full, or cannot be written: clear errors, nothing lost.

The disk is a small tmpfs, which only root may mount.
"""

import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from serving.weights.release_store import UNFINISHED, served_release
from tests.disk_fixtures import mount_or_skip, small_disk, unmount
from tests.soak import checks
from tests.soak.stack import StackUnderFire, rows, until
from tests.stack_fixtures import configure, workplace_in

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

HANG_SECONDS = 10


@pytest.fixture
def stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StackUnderFire]:
    """A stack whose state is on a disk of its own, with one release."""
    monkeypatch.setenv("PIPELINE_JOBS__RETRY_SECONDS", "1")
    monkeypatch.setenv("PIPELINE_STACK__HANG_SECONDS", str(HANG_SECONDS))
    stack = StackUnderFire(workplace_in(tmp_path))
    with small_disk(stack.home, "256m"):
        try:
            stack.ensure_up()
            stack.clone()
            push(stack)
            checks.settle(stack)
            yield stack
        finally:
            print(stack.workplace.logs())  # pytest shows it where the test failed
            stack.stop()


def push(stack: StackUnderFire) -> bool:
    stack.commit(rows(random.Random(len(stack.shas)), len(stack.shas)))
    return stack.answered(stack.push(), len(stack.shas))


def answers(stack: StackUnderFire) -> str:
    asked = {"model": "facts", "prompt": "Shelf", "max_tokens": 2}
    answer = httpx.post(f"{stack.workplace.url('serving')}/v1/completions", json=asked, timeout=60)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["system_fingerprint"])


def is_answering(stack: StackUnderFire) -> bool:
    try:
        answers(stack)
    except (httpx.TransportError, AssertionError):
        return False
    return True


def test_a_full_disk_keeps_the_old_release_and_what_was_pushed(stack: StackUnderFire) -> None:
    before = answers(stack)
    filler = stack.home / "filler"
    with filler.open("wb") as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(bytes(2**20))
            file.flush()

    was_answered = push(stack)
    assert answers(stack) == before
    served = served_release(stack.releases_dir)
    assert served is not None and served.name == before
    assert not list(stack.releases_dir.glob(f"{UNFINISHED}*"))
    stack.kill("serve")
    until(lambda: is_answering(stack), 60, "the server is up again, although the disk is full")
    assert answers(stack) == before

    # There is room for what is pushed, and none for a release.
    filler.unlink()
    with filler.open("wb") as file:
        file.write(bytes(shutil.disk_usage(stack.home).free - 32 * 2**20))
    assert was_answered or stack.answered(stack.push(), len(stack.shas))
    with stack.jobs() as store:
        until(lambda: len(store.list()) > 1, 120, "the push leads to a job")
        until(lambda: store.list()[0].has_ended, 120, "the job ends")
        outcome = store.list()[0].outcome
    assert outcome is not None and outcome.result == "failed"
    assert "fit" in (outcome.reason or "") or "space" in (outcome.reason or ""), outcome
    assert answers(stack) == before
    assert not list(stack.releases_dir.glob(f"{UNFINISHED}*"))

    # With room again, the next commit brings the rows of the one that failed, too.
    filler.unlink()
    assert push(stack)
    checks.settle(stack)
    assert answers(stack) == checks.newest(stack) != before


def test_a_folder_that_became_read_only_keeps_the_old_release(stack: StackUnderFire) -> None:
    # Wait until the checkpoints of the first job are gone. While the folder is read-only, they
    # cannot be removed, and the runner tries once.
    checks.check(stack)
    before = answers(stack)
    mount_or_skip("--bind", str(stack.home), str(stack.home))
    try:
        mount_or_skip("-o", "remount,bind,ro", str(stack.home))
        read_only_since = time.monotonic()
        assert not push(stack)
        # Longer than a service may be silent.
        while time.monotonic() < read_only_since + 2 * HANG_SECONDS:
            assert answers(stack) == before
            time.sleep(0.5)
        services = stack.workplace.json("status")["services"]
        assert {each["state"] for each in services} == {"up"}, services
        assert {each["restarts"] for each in services} == {0}, services
    finally:
        unmount(stack.home)
    assert stack.answered(stack.push(), len(stack.shas))
    checks.settle(stack)
    checks.check(stack)
    assert answers(stack) == checks.newest(stack) != before


def test_up_in_a_read_only_folder_says_so(tmp_path: Path) -> None:
    workplace = workplace_in(tmp_path)
    configure(workplace)
    with small_disk(workplace.home, "1m"):
        workplace.run("env")  # makes the tokens
        mount_or_skip("-o", "remount,ro", str(workplace.home))
        assert workplace.run("jobs", "ls") == "No job yet.\n", "who only reads needs no more"
        for command in (["up"], ["up", "--detach"]):
            done = subprocess.run(
                [sys.executable, "-m", "pipeline", *command],
                env=workplace.env,
                capture_output=True,
                text=True,
                check=False,
                timeout=60,
            )
            assert done.returncode == 1
            assert "Traceback" not in done.stderr
            assert str(workplace.home) in done.stderr, done.stderr
            assert "read-only" in done.stderr.lower(), done.stderr
