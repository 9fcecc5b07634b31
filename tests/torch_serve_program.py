"""A server over the torch engine. With `stops`, it stops in the commit of its next swap, says so,
and waits to be killed: `python -m tests.torch_serve_program PIPELINE_DIR [stops]`."""

import asyncio
import sys
from pathlib import Path

from serving.app import serve
from serving.engines.settings import TorchEngineSettings
from serving.engines.torch_engine.engine import TorchEngine
from serving.settings import ServingSettings
from tests.serving_fixtures import echo_app


class StoppingEngine(TorchEngine):
    def __init__(self, *, stops: bool) -> None:
        super().__init__(TorchEngineSettings(num_threads=1, kv_cache_bytes=64 << 20))
        self._stops = stops
        self._num_committed = 0

    async def commit(self, release_id: str) -> None:
        await super().commit(release_id)
        if self._stops and self._num_committed:
            print("in commit", flush=True)
            await asyncio.Event().wait()
        self._num_committed += 1


if __name__ == "__main__":
    pipeline_dir, *options = sys.argv[1:]
    engine = StoppingEngine(stops="stops" in options)
    serve(echo_app(Path(pipeline_dir), engine), ServingSettings(port=0))
