"""What is NaN or infinite is found in every dtype that a network computes with. Reading shards
gives way to the threads that answer, and never asks for more than the server has."""

import os
import sys
import threading

import pytest
import torch

from serving.weights import shards
from serving.weights.shards import is_finite, yield_to_other_threads

FLOATS = [
    *(torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("piece", [4, 1 << 22])
def test_one_value_among_many_is_found(
    dtype: torch.dtype, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "_FINITE_CHECK_ELEMENTS", piece)
    tensor = torch.arange(10.0).reshape(5, 2).to(dtype)
    assert is_finite(tensor)
    tensor[4, 1] = torch.nan
    assert not is_finite(tensor)
    # Turned round, it is not in the order of its memory.
    assert not is_finite(tensor.T)


def test_the_largest_number_is_one() -> None:
    assert is_finite(torch.tensor([torch.finfo(torch.float64).max], dtype=torch.float64))
    assert not is_finite(torch.tensor([torch.inf], dtype=torch.float64))


def test_whole_numbers_are_finite() -> None:
    assert is_finite(torch.tensor([-(2**62), 2**62]))
    assert is_finite(torch.empty(0))


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
