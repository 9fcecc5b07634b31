"""Staging gives way to the threads that answer, and never asks for more than the server has."""

import os
import sys
import threading

import pytest

from serving.weights.shards import yield_to_other_threads


@pytest.mark.skipif(sys.platform != "linux", reason="only there, a thread has its own nice value")
@pytest.mark.parametrize(("before", "after"), [(0, 5), (10, 10)])
def test_a_nice_value_only_rises(before: int, after: int) -> None:
    # Only root may lower one, so a server under `nice` could not stage.
    found: list[int] = []

    def stage() -> None:
        os.setpriority(os.PRIO_PROCESS, 0, before)
        yield_to_other_threads()
        found.append(os.getpriority(os.PRIO_PROCESS, 0))

    thread = threading.Thread(target=stage)
    thread.start()
    thread.join()
    assert found == [after]
