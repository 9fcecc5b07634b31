"""`HotpushWorker`: methods that are added to each vLLM worker. `collective_rpc` calls them by name.

While a worker answers a call, it computes no tokens. So all calls but `hotpush_prepare` and
`hotpush_commit` return at once.
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

from serving.engines.torch_engine.device import yield_to_other_threads
from serving.engines.vllm_shadow import CannotCopy
from serving.engines.vllm_weights import (
    CopiedWeights,
    ReloadedWeights,
    StagingFailed,
    WeightsInMemory,
)
from serving.errors import ReleaseError

_log = logging.getLogger(__name__)

_WATCH_SECONDS = 1.0
_END_SECONDS = 5.0


class HotpushWorker:
    """vLLM makes this a base class of its worker and never calls `__init__`, so `hotpush_prepare`
    must be called first. All names have a prefix, so that none is also a name of vLLM's worker."""

    def hotpush_prepare(
        self, release_id: str, folder: str, weight_map: dict[str, str], way: str, server_pid: int
    ) -> dict[str, Any]:
        """Call it after vLLM has started on a release, before the first request. It prepares later
        swaps. Returns the worker's pid, the way of swaps, and the reason if copying is not
        possible."""
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
            # After any other error, vLLM's own reload can still be used.
            except Exception as error:
                _log.exception("no second copy of the model")
                reason = f"{type(error).__name__}: {error}"
        if weights is None:
            weights = ReloadedWeights(self, release_id)
        self.hotpush_weights = weights
        self.hotpush_jobs: dict[str, _Staging] = {}
        return {"pid": os.getpid(), "way": weights.way, "reason": reason}

    def hotpush_needed_bytes(self, stored: dict[str, int]) -> int:
        """The host memory that is needed to stage these tensors. `stored` is tensor name → bytes in
        the shard."""
        return self.hotpush_weights.needed_bytes(stored)

    def hotpush_stage(
        self, release_id: str, base_id: str, folder: str, changed: dict[str, list[str]]
    ) -> None:
        """Begin to stage on another thread. `hotpush_status` tells when this has ended."""
        # The call has turned tuples into lists.
        pairs = {name: (file, digest) for name, (file, digest) in changed.items()}
        job = _Staging(
            partial(self.hotpush_weights.stage, release_id, base_id, Path(folder), pairs),
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
        """Returns for how many seconds the worker computed no tokens."""
        started = time.perf_counter()
        self.hotpush_weights.commit(release_id)
        return time.perf_counter() - started

    def hotpush_forget(self, release_id: str) -> None:
        job = self.hotpush_jobs.pop(release_id, None)
        if job is None or not job.abandon():
            self.hotpush_weights.forget(release_id)


def _end_with_server(server_pid: int) -> None:
    """End vLLM when the server is killed. Otherwise its processes would wait for the server for
    ever."""
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
            # Readable as soon as the process has ended, even if its parent does not wait for it.
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
        self._ending = threading.Lock()
        self._is_unwanted = False
        self.is_done = False
        self.refusals: tuple[str, ...] = ()
        self.error: str | None = None
        self.read_bytes = 0
        self.seconds = 0.0

    def run(self) -> None:
        started = time.perf_counter()
        try:
            yield_to_other_threads()
            self.read_bytes = self._stage()
        except ReleaseError as error:
            self.refusals = error.reasons
        except StagingFailed as error:
            self.refusals = (str(error),)
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"
        self.seconds = time.perf_counter() - started
        with self._ending:
            self.is_done = True
            is_unwanted = self._is_unwanted
        if is_unwanted:
            self._forget()

    def abandon(self) -> bool:
        """If the thread still runs, it frees the weights when it ends. Returns False if it has
        ended."""
        with self._ending:
            self._is_unwanted = True
            return not self.is_done
