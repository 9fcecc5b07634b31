"""The processes that train together: who is first, sums over all of them. One process is a group of
its own."""

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def add_up(tensors: list[Tensor]) -> None:
    """Replace each tensor by its sum over all processes. Every process gets the same bits."""
    if not dist.is_initialized():
        return
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.all_reduce(flat)
    for tensor, part in zip(
        tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True
    ):
        tensor.copy_(part.view_as(tensor))


def from_first(value: float, device: torch.device) -> float:
    """The value that the first process has."""
    if not dist.is_initialized():
        return value
    told = torch.tensor(value, dtype=torch.float64, device=device)
    dist.broadcast(told, src=0)
    return float(told)


@contextlib.contextmanager
def process_group() -> Iterator[None]:
    """Join the group that torchrun's environment describes."""
    # Import torch._dynamo before init_process_group: importing it later, as models do, sometimes
    # aborts the interpreter at exit.
    import torch._dynamo

    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()
