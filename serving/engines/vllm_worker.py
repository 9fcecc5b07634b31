"""`HotpushWorker`: what is added to each vLLM worker, called by name through `collective_rpc`.

Every call but `hotpush_prepare` returns at once: a worker that answers a call computes no tokens.
"""

import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from serving.engines.vllm_shadow import CannotCopy
from serving.engines.vllm_weights import (
    CopiedWeights,
    ReloadedWeights,
    StagingFailed,
    WeightsInMemory,
    lower_thread_priority,
)
from serving.errors import ReleaseError

_log = logging.getLogger(__name__)

_WATCH_SECONDS = 1.0
_END_SECONDS = 5.0


class HotpushWorker:
    """vLLM makes it a base class of its worker and never calls `__init__`: `hotpush_prepare` comes
    first. Names have a prefix since none may clash with the worker's."""

    def hotpush_prepare(
        self, release_id: str, folder: str, weight_map: dict[str, str], way: str, server_pid: int
    ) -> dict[str, Any]:
        """After the start on a release, and before its first request: make ready for the next."""
        threading.Thread(
            target=_end_with_server, args=(server_pid,), name="hotpush-server-watch", daemon=True
        ).start()
        reason = None
        weights: WeightsInMemory | None = None
        if way == "copy":
            try:
                weights = CopiedWeights(self, release_id, Path(folder), weight_map)
            except CannotCopy as error:
                reason = str(error)
            # Whatever else it is, vLLM's own way is left.
            except Exception as error:
                _log.exception("no second copy of the model")
                reason = f"{type(error).__name__}: {error}"
        if weights is None:
            weights = ReloadedWeights(self, release_id)
        self.hotpush_weights = weights
        self.hotpush_jobs: dict[str, _Staging] = {}
        return {"pid": os.getpid(), "way": weights.way, "reason": reason}

    def hotpush_needed_bytes(self, stored: dict[str, int]) -> int:
        """Host memory to stage these tensors, which are given with their stored bytes."""
        return self.hotpush_weights.needed_bytes(stored)

    def hotpush_stage(
        self, release_id: str, base_id: str, folder: str, changed: dict[str, list[str]]
    ) -> None:
        """Begin on a thread of its own; ask `hotpush_status`."""
        # Tuples are lists on the wire.
        told = {name: (file, digest) for name, (file, digest) in changed.items()}
        job = _Staging(
            partial(self.hotpush_weights.stage, release_id, base_id, Path(folder), told),
            partial(self.hotpush_weights.forget, release_id),
        )
        self.hotpush_jobs[release_id] = job
        job.start()

    def hotpush_status(self, release_id: str) -> dict[str, Any]:
        job = self.hotpush_jobs[release_id]
        return {
            "is_done": job.is_done,
            "refusals": job.refusals,
            "error": job.error,
            "read_bytes": job.read_bytes,
            "seconds": job.seconds,
        }

    def hotpush_commit(self, release_id: str) -> float:
        """Seconds in which no token was computed."""
        started = time.perf_counter()
        self.hotpush_weights.commit(release_id)
        return time.perf_counter() - started

    def hotpush_forget(self, release_id: str) -> None:
        job = self.hotpush_jobs.pop(release_id, None)
        if job is not None and not job.is_done:
            job.is_unwanted = True
            return
        self.hotpush_weights.forget(release_id)


def _end_with_server(server_pid: int) -> None:
    """A killed server leaves no vLLM behind: vLLM's processes would wait for it for ever."""
    engine_pid = os.getppid()
    _wait_for_end_of(server_pid)
    with suppress(ProcessLookupError):
        os.kill(engine_pid, signal.SIGTERM)
        time.sleep(_END_SECONDS)
        os.kill(engine_pid, signal.SIGKILL)
    os._exit(1)


def _wait_for_end_of(pid: int) -> None:
    with suppress(ProcessLookupError):
        if sys.platform == "linux":
            # Ready as soon as it has ended, even when nobody collects it.
            select.select([os.pidfd_open(pid)], [], [])
            return
        while True:
            os.kill(pid, 0)
            time.sleep(_WATCH_SECONDS)


class _Staging(threading.Thread):
    def __init__(self, stage: Callable[[], int], forget: Callable[[], None]) -> None:
        super().__init__(name="hotpush-staging", daemon=True)
        self._stage = stage
        self._forget = forget
        self.is_done = False
        self.is_unwanted = False
        self.refusals: tuple[str, ...] = ()
        self.error: str | None = None
        self.read_bytes = 0
        self.seconds = 0.0

    def run(self) -> None:
        started = time.perf_counter()
        try:
            lower_thread_priority()
            self.read_bytes = self._stage()
        except ReleaseError as error:
            self.refusals = error.reasons
        except StagingFailed as error:
            self.refusals = (str(error),)
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"
        self.seconds = time.perf_counter() - started
        self.is_done = True
        if self.is_unwanted:
            self._forget()
