"""One job in several processes, for a training that is too large or too slow for one: each has a
part of the weights, of their gradients and of the optimizer's state (FSDP2), and computes a part of
each step.

`start` lets torchrun start the whole job in each of them. The first process does all that a job
does. The others only help it to train: what they need comes from the first one, so they read no
file of the job, and may be on other machines. A process that is alone may call everything below
`start`, too; it then has all of the weights.
"""

import copy
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from itertools import count
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from jobs.errors import TEMPORARY_FAILURE
from jobs.process import lower_priority

Result = TypeVar("Result")
Thing = TypeVar("Thing")

_WAIT = timedelta(days=7)
"""How long a process waits for the others: the first one may measure for hours before it trains. If
one ends, torchrun ends the others."""


def start(nodes: int, processes: int) -> int:
    """Run the job in so many processes on each of so many machines. Returns its exit code:
    TEMPORARY_FAILURE if a process was killed.

    For several machines, it must be called on the first one of an allocation of Slurm."""
    if nodes > 1 and "MASTER_ADDR" not in os.environ:
        with socket.socket() as free:
            free.bind(("", 0))
            place = {"MASTER_ADDR": socket.gethostname(), "MASTER_PORT": str(free.getsockname()[1])}
        # By default, only the variables that `sbatch` exports reach the other machines.
        command = ["srun", "--export=ALL", f"--nodes={nodes}", "--ntasks-per-node=1"]
        command += ["--kill-on-bad-exit=1"]
        if (cpus := os.environ.get("SLURM_CPUS_PER_TASK")) is not None:
            command.append(f"--cpus-per-task={cpus}")  # `srun` does not take it from `sbatch`
        command += [sys.executable, "-m", "pipeline.retrain", str(nodes), str(processes)]
        codes = [subprocess.run(command, env={**os.environ, **place}, check=False).returncode]
    else:
        codes = _start_here(nodes, processes)
    return max(codes) if {*codes} <= {0, 1} else TEMPORARY_FAILURE


def _start_here(nodes: int, processes: int) -> list[int]:
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    environ = os.environ
    threads = int(environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1)
    environ["OMP_NUM_THREADS"] = str(max(1, threads // processes))
    where = ["--standalone"]
    if nodes > 1:
        where = [f"--nnodes={nodes}", f"--node-rank={environ['SLURM_NODEID']}"]
        where += [f"--master-{key}={environ[f'MASTER_{key.upper()}']}" for key in ("addr", "port")]
    arguments = [*where, f"--nproc-per-node={processes}", "-m", "pipeline.retrain"]
    try:
        torchrun.run(torchrun.parse_args(arguments))  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        return [failure.exitcode for failure in error.failures.values()]
    return [0]


def run_part(job: Callable[[], int], help_to_train: Callable[[Any, Any], None]) -> NoReturn:
    """Run `job` in the first process. In the others, call `help_to_train` with what the first one
    hands out, until its job has ended. Ends the process with the exit code of the job."""
    # Before the group is made: if a model imports it later, Python sometimes crashes at its end.
    import torch._dynamo

    lower_priority(0)  # torchrun has made a session for this process
    backend = "gloo"
    if torch.cuda.is_available():
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(backend, timeout=_WAIT)
    code = 0
    try:
        if rank() == 0:
            code = job()
        else:
            while (given := from_first(None)) is not None:
                model, work = given
                help_to_train(_shard(model, {}), work)
        if rank() == 0 and code == 0:  # otherwise torchrun ends the others
            from_first(None)
    finally:
        dist.destroy_process_group()
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)  # Python sometimes crashes at its end, because threads of torch still run


def num_processes() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def from_first(value: Result) -> Result:
    """The `value` of the first process, in every process."""
    told = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(told, device=torch.device("cpu"))
    return told[0]


def add_up(numbers: Sequence[float]) -> list[float]:
    """The sums of these numbers over all processes."""
    sums = torch.tensor(numbers, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(sums)
    return sums.tolist()


def own_part(blocks: Sequence[Sequence[Thing]]) -> list[list[Thing]]:
    """Of the things in `blocks`, each process gets every n-th."""
    places = count()
    own = [[each for each in block if next(places) % num_processes() == rank()] for block in blocks]
    return [block for block in own if block]


class Whole(nn.Module):
    """Calls functions that use a model. Inside a call, the weights that a function uses are there,
    whichever process has them. So every process must make the same calls, and in each call run the
    layers of the model equally often."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[..., Result], *given: Any, **named: Any) -> Result:
        return function(self.model, *given, **named)


def hand_out(model: PreTrainedModel, work: Any) -> Whole:
    """Give each of the other processes its part of the weights, and `work`. Afterwards, `model` is
    without weights. Call this in the first process."""
    tensors = dict(_tensors(model))
    model.to("meta").tie_weights()
    from_first((model, work))
    return _shard(copy.deepcopy(model), tensors)


def _tensors(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


@torch.no_grad()
def _shard(model: PreTrainedModel, tensors: dict[str, Tensor]) -> Whole:
    """Keep a part of `model`, which has no weights yet, in each process. The first process has its
    `tensors`."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    kind = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(kind, (num_processes(),))
    whole = Whole(model)
    layers = model._no_split_modules or ()  # the names of their classes
    for module in [each for each in model.modules() if type(each).__name__ in layers]:
        fully_shard(module, mesh=mesh)
    # Without the last argument, these weights stay whole after a measurement.
    fully_shard(whole, mesh=mesh, reshard_after_forward=True)
    whole.to_empty(device=kind)
    for name, own in _tensors(model):
        full = tensors.pop(name) if tensors else torch.empty(own.shape, dtype=own.dtype)
        if isinstance(own, DTensor):
            own.copy_(distribute_tensor(full.to(kind), mesh, own.placements))
        else:
            own.copy_(full)
            dist.broadcast(own, 0)
    return whole
