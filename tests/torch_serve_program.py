"""A server over the torch engine that stops in one phase of its next swap, says so, and waits to be
killed: `python -m tests.torch_serve_program PIPELINE_DIR [PHASE]`."""

import asyncio
import sys
from pathlib import Path

from serving.app import serve
from serving.engines.settings import TorchEngineSettings
from serving.engines.torch_engine.engine import TorchEngine
from serving.settings import ServingSettings
from serving.weights.release import Release
from tests.serving_fixtures import echo_app


class StoppingEngine(TorchEngine):
    def __init__(self, phase: str | None) -> None:
        super().__init__(TorchEngineSettings(num_threads=1, kv_cache_bytes=64 << 20))
        self._phase = phase
        self._num_committed = 0

    async def stage(self, release: Release, folder: Path) -> None:
        await super().stage(release, folder)
        await self._stop_in("stage")

    async def commit(self, release_id: str) -> None:
        await super().commit(release_id)
        await self._stop_in("commit")
        self._num_committed += 1

    async def _stop_in(self, phase: str) -> None:
        if phase == self._phase and self._num_committed:
            print(f"in {phase}", flush=True)
            await asyncio.Event().wait()


if __name__ == "__main__":
    pipeline_dir, *phase = sys.argv[1:]
    engine = StoppingEngine(phase[0] if phase else None)
    serve(echo_app(Path(pipeline_dir), engine), ServingSettings(port=0))
