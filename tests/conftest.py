"""Settings for all tests, mainly of what takes their time.

Several tests share two cores, so an example of hypothesis may take any time. No test fails for its
time here; pytest's own time limit ends a test that hangs.
"""

import asyncio
import gc
import os
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import httpx._transports.default
import pytest
import uvicorn.server
from hypothesis import HealthCheck, settings

settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")

# Servers and clients speak plain HTTP here, but each client of httpx would load all certificate
# authorities.
httpx._transports.default.create_ssl_context = cache(httpx.create_ssl_context)


class _Asyncio:
    """asyncio, with shorter sleeps for uvicorn: otherwise each stop of a server takes 0.2 s."""

    @staticmethod
    async def sleep(seconds: float) -> None:
        await asyncio.sleep(seconds / 10)

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)


uvicorn.server.asyncio = _Asyncio()  # type: ignore[assignment]


@pytest.hookimpl(trylast=True)  # after those that are not asked for were left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Modules with long time limits come first, so that all processes end at about the same time.
    The order is otherwise as it was."""
    limits: Counter[Path] = Counter()
    for item in items:
        if mark := item.get_closest_marker("timeout"):
            limits[item.path] = max(limits[item.path], mark.args[0])
    items.sort(key=lambda item: limits[item.path], reverse=True)


def pytest_collection_finish() -> None:
    """Exclude what all tests have imported from garbage collection."""
    gc.collect()
    gc.freeze()


OURS = ("PIPELINE_", "HF_", "WEBHOOK_", "JOB_", "DATASET_")
"""What our variables begin with. Libraries, such as torch, may set their own."""


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """The event loop of tests that are coroutines."""
    return "asyncio"


@pytest.fixture(autouse=True)
def same_environment() -> Iterator[None]:
    """No test changes the environment of the tests after it."""
    before = {name: each for name, each in os.environ.items() if name.startswith(OURS)}
    yield
    after = {name: each for name, each in os.environ.items() if name.startswith(OURS)}
    assert after == before
