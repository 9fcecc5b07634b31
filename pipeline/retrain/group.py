"""The group of processes that train together: the rank of this process, and sums over all
processes. A process that trains alone is a group of one."""

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
    """Replace each tensor by its sum over all processes. The result is bit for bit the same in each
    process."""
    if not dist.is_initialized():
        return
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.all_reduce(flat)
    for tensor, part in zip(
        tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True
    ):
        tensor.copy_(part.view_as(tensor))


def from_first(value: float, device: torch.device) -> float:
    """The `value` of the first process, in every process."""
    if not dist.is_initialized():
        return value
    told = torch.tensor(value, dtype=torch.float64, device=device)
    dist.broadcast(told, src=0)
    return float(told)


@contextlib.contextmanager
def process_group() -> Iterator[None]:
    """Join the group that torchrun's environment describes."""
    # Import torch._dynamo before init_process_group. Otherwise a model imports it later, and the
    # interpreter sometimes crashes at exit.
    import torch._dynamo

    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()
