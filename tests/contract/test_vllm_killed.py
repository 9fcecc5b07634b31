"""A vLLM whose worker is killed: the server says so, and what was served stays the release."""

import asyncio
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="make test-vllm has it", exc_type=ModuleNotFoundError)

from serving.weights.release_store import served_or_empty
from tests.vllm_fixtures import served, vllm_release

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


@pytest.mark.parametrize("phase", ["answer", "commit"])
def test_a_server_whose_vllm_is_killed_says_that_it_must_be_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    first, second = (vllm_release(tmp_path, seed, tied=True) for seed in (1, 2))
    with served(tmp_path, first, second) as running, ThreadPoolExecutor(2) as pool:
        engine = running.engine
        if phase == "answer":
            asked = [pool.submit(running.completion, max_tokens=300, n=16) for _ in range(2)]
            while running.num_unfinished() < 2 * 16:
                time.sleep(0.01)
            os.kill(engine.pids[0], signal.SIGKILL)
            assert {answer.result().status_code for answer in asked} == {503}
        else:
            call = engine._call

            async def killed_call(method: str, *arguments: Any) -> list[Any]:
                if method == "hotpush_commit":
                    # Once the worker was asked, and before it can answer.
                    os.kill(engine.pids[0], signal.SIGSTOP)
                    asyncio.get_running_loop().call_later(
                        0.2, os.kill, engine.pids[0], signal.SIGKILL
                    )
                return await call(method, *arguments)

            monkeypatch.setattr(engine, "_call", killed_call)
            result = running.swap(second.id)
            assert (result["result"], result["phase"]) == ("failed", "commit")
        with running.client() as http:
            for path, status in (("/live", "dead"), ("/health", "failed")):
                answer = http.get(path)
                assert (answer.status_code, answer.json()["status"]) == (503, status)
        assert running.completion().status_code == 503
        assert served_or_empty(running.pipeline_dir).release == first.id
