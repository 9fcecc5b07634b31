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
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from jobs.errors import TEMPORARY_FAILURE
from jobs.folder import SPEC
from jobs.process import lower_priority
from jobs.spec import JobSpec

Result = TypeVar("Result")
Thing = TypeVar("Thing")

_WAIT = timedelta(days=7)
"""How long a process waits for the others: the first one may measure for hours before it trains. If
one ends, torchrun ends the others."""

_IN_RAY = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Ray sets this variable in its jobs. A cluster of Ray may be inside an allocation of Slurm."""


def start(nodes: int, processes: int) -> int:
    """Run the job in so many processes on each of so many machines. Returns its exit code:
    TEMPORARY_FAILURE if a process was killed.

    For several machines, it must be called in a job of Ray, or on the first one of an allocation of
    Slurm."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    command = [sys.executable, "-m", "pipeline.retrain", str(nodes), str(processes)]
    codes = [0]
    if nodes == 1 or "MASTER_ADDR" in os.environ:
        try:
            _start_here(nodes, processes)
        except ChildFailedError as error:
            codes = [failure.exitcode for failure in error.failures.values()]
    elif _IN_RAY in os.environ:
        codes = [_start_on_ray(nodes, processes, command)]
    else:
        # By default, only the variables that `sbatch` exports reach the other machines.
        srun = ["srun", "--export=ALL", f"--nodes={nodes}", "--ntasks-per-node=1"]
        srun += ["--kill-on-bad-exit=1"]
        if (cpus := os.environ.get("SLURM_CPUS_PER_TASK")) is not None:
            srun.append(f"--cpus-per-task={cpus}")  # `srun` does not take it from `sbatch`
        place = os.environ | _meeting_place(socket.gethostname())
        codes = [subprocess.run([*srun, *command], env=place, check=False).returncode]
    return max(codes) if {*codes} <= {0, 1} else TEMPORARY_FAILURE


def _meeting_place(host: str) -> dict[str, str]:
    with socket.socket() as free:
        free.bind(("", 0))
        return {"MASTER_ADDR": host, "MASTER_PORT": str(free.getsockname()[1])}


def _start_on_ray(nodes: int, processes: int, command: list[str]) -> int:
    """Run `command` here, and a task of Ray on each of the other machines. Ray ends the tasks when
    this process ends. Returns the exit code of `command`."""
    try:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
    except ImportError:
        sys.exit(
            "A job with `nodes` on Ray needs the Python package `ray`: install the cluster's "
            f"version for {sys.executable}, or remove `nodes` from [pipelines.resources]"
        )
    ray.init()
    asked = JobSpec.model_validate_json(Path(os.environ["JOB_DIR"], SPEC).read_bytes()).resources
    bundle = {"CPU": asked.cpus or 1, "GPU": asked.gpus, "memory": asked.memory_bytes}
    elsewhere = {"ray.io/node-id": f"!{ray.get_runtime_context().get_node_id()}"}
    group = ray.util.placement_group(
        [{name: number for name, number in bundle.items() if number}] * (nodes - 1),
        strategy="STRICT_SPREAD",
        bundle_label_selector=[elsewhere] * (nodes - 1),
    )
    ray.get(group.ready())  # as Slurm, wait for all machines
    place = _meeting_place(ray.util.get_node_ip_address())
    task, others = ray.remote(_start_here), []
    for rank in range(1, nodes):
        variables = place | {"NODE_RANK": str(rank)}
        there = task.options(
            num_cpus=bundle["CPU"],
            num_gpus=bundle["GPU"],
            max_retries=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group),
            runtime_env={"py_executable": sys.executable, "env_vars": variables},
        )
        others.append(there.remote(nodes, processes))
    first = subprocess.Popen(command, env=os.environ | place | {"NODE_RANK": "0"})
    try:
        while others and first.poll() is None:
            ended, others = ray.wait(others, timeout=1)
            ray.get(ended)
        return first.wait()
    except ray.exceptions.RayError as error:
        print(f"The training on another machine has ended: {error}", file=sys.stderr)
        return TEMPORARY_FAILURE
    finally:
        first.kill()


def _start_here(nodes: int, processes: int) -> None:
    """Raises ChildFailedError."""
    from torch.distributed import run as torchrun

    environ = os.environ
    environ["TORCHRUN_PID"] = str(os.getpid())
    threads = int(environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1)
    environ["OMP_NUM_THREADS"] = str(max(1, threads // processes))
    where = ["--standalone"]
    if nodes > 1:
        rank = environ.get("NODE_RANK") or environ["SLURM_NODEID"]
        where = [f"--nnodes={nodes}", f"--node-rank={rank}"]
        where += [f"--master-{key}={environ[f'MASTER_{key.upper()}']}" for key in ("addr", "port")]
    arguments = [*where, f"--nproc-per-node={processes}", "-m", "pipeline.retrain"]
    torchrun.run(torchrun.parse_args(arguments))  # type: ignore[no-untyped-call]


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
