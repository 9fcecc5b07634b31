"""`HotpushWorker`: methods that are added to each vLLM worker. `collective_rpc` calls them by name.

While a worker answers a call, it computes no tokens. So all calls but `hotpush_prepare` and
`hotpush_commit` return at once.
"""

import logging
import os
import select
import signal
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from serving.engines.machine import yield_to_other_threads
from serving.engines.vllm_weights import CopiedWeights, ReloadedWeights, StoredTensors
from serving.errors import ReleaseError

_log = logging.getLogger(__name__)


class HotpushWorker:
    """vLLM makes this a base class of its worker and never calls `__init__`, so `hotpush_prepare`
    must be called first. All names have a prefix, so that none is also a name of vLLM's worker."""

    def hotpush_prepare(
        self, release_id: str, folder: str, tensors: StoredTensors, way: str, server_pid: int
    ) -> dict[str, Any]:
        """Call it after vLLM has started on a release, before the first request. It prepares later
        swaps. Returns the worker's pid, the way of swaps, and the reason if copying is not
        possible."""
        if hasattr(os, "pidfd_open"):
            threading.Thread(target=_end_with_server, args=(server_pid,), daemon=True).start()
        self.hotpush_thread = ThreadPoolExecutor(1, "hotpush-staging", yield_to_other_threads)
        self.hotpush_stagings: dict[str, Future[int]] = {}
        self.hotpush_weights: CopiedWeights | ReloadedWeights
        reason = None
        if way == "copy":
            try:
                self.hotpush_weights = CopiedWeights(self, release_id, Path(folder), tensors)
            # After any error, vLLM's own reload can still be used.
            except Exception as error:
                _log.info("no second copy of the model", exc_info=True)
                way, reason = "reload", f"{type(error).__name__}: {error}"
        if way == "reload":
            self.hotpush_weights = ReloadedWeights(self, release_id, Path(folder), tensors)
        return {"pid": os.getpid(), "way": way, "reason": reason}

    def hotpush_take_turn(self) -> None:
        """Does nothing. A worker that hangs does not answer the call."""

    def hotpush_stage(
        self, release_id: str, base_id: str, folder: str, changed: StoredTensors
    ) -> None:
        """Begin to stage on another thread. `hotpush_status` tells when this has ended."""
        self.hotpush_stagings[release_id] = self.hotpush_thread.submit(
            self.hotpush_weights.stage, release_id, base_id, Path(folder), changed
        )

    def hotpush_status(self, release_id: str) -> dict[str, Any] | None:
        """None while the release is being staged."""
        staging = self.hotpush_stagings[release_id]
        if not staging.done():
            return None
        match staging.exception():
            case None:
                return {"reasons": [], "read_bytes": staging.result()}
            case ReleaseError() as error:
                return {"reasons": list(error.reasons)}
            case error:
                return {"reasons": [f"{type(error).__name__}: {error}"]}

    def hotpush_commit(self, release_id: str) -> float:
        """Returns for how many seconds the worker computed no tokens."""
        started = time.perf_counter()
        self.hotpush_weights.commit(release_id)
        return time.perf_counter() - started

    def hotpush_forget(self, release_id: str) -> None:
        """Free the release, now or as soon as its staging has ended."""
        if (staging := self.hotpush_stagings.pop(release_id, None)) is None:
            self.hotpush_weights.forget(release_id)
        elif not staging.cancel():
            staging.add_done_callback(lambda _: self.hotpush_weights.forget(release_id))


def _end_with_server(server_pid: int) -> None:
    """End vLLM when the server is killed. Otherwise its processes would wait for the server for
    ever."""
    engine_pid = os.getppid()
    with suppress(ProcessLookupError):
        # Readable as soon as the process has ended, even if its parent does not wait for it.
        select.select([os.pidfd_open(server_pid)], [], [])
        os.kill(engine_pid, signal.SIGKILL)
    os._exit(1)
