"""The group of processes that train together. Every process holds the whole model, and computes a
share of the blocks of each step. The gradients of all processes are added up. A process that trains
alone is a group of one."""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from jobs.process import die_with_parent
from pipeline.retrain.errors import TemporaryError, TrainError


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def add_up(model: PreTrainedModel, numbers: list[float]) -> list[float]:
    """Replace the gradients in each process by their sum over all processes. Returns the sums of
    `numbers`. The result is bit for bit the same in each process."""
    trained = [each for each in model.parameters() if each.requires_grad]
    sums = torch.tensor(numbers, device=model.device)
    added = [torch.zeros_like(each) if each.grad is None else each.grad for each in trained]
    flat = torch.cat([each.reshape(-1) for each in (*added, sums)])
    dist.all_reduce(flat)
    *parts, sums = torch.split(flat, [each.numel() for each in (*trained, sums)])
    for parameter, part in zip(trained, parts, strict=True):
        parameter.grad = part.view_as(parameter)
    return sums.tolist()


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


def run_group(count: int, work: Callable[[bytes], None], given: bytes) -> None:
    """Call `work(given)` in `count` processes, which form a group.

    If one process ends too early, the others are ended too. Raises the TrainError of the first
    process that failed. If it was killed or failed otherwise, raises TemporaryError: the next
    attempt of the job continues from the last checkpoint.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
    )
    # The launcher sets handlers of its own.
    kinds = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    handlers = {kind: signal.getsignal(kind) for kind in kinds}
    try:
        elastic_launch(config, _member)(os.getpid(), work, given)
    except ChildFailedError as error:
        said = error.get_first_failure()[1].message
        reason = said["message"] if isinstance(said, dict) else said
        if reason.startswith("TrainError: "):
            raise TrainError(reason.removeprefix("TrainError: ")) from error
        raise TemporaryError(
            f"one of {count} training processes ended too early ({reason}); see the job's log"
        ) from error
    finally:
        for kind, handler in handlers.items():
            signal.signal(kind, handler)


def _member(job: int, work: Callable[[bytes], None], given: bytes) -> None:
    """job: the pid of the process that started the group. If it ends, this process ends too."""
    die_with_parent(job)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    with process_group():
        work(given)
