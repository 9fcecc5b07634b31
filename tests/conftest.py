"""Settings of hypothesis for all tests, and the event loop of those that are coroutines.

Several tests share two cores, so an example may take any time. No test fails for its time here;
pytest's own time limit ends a test that hangs.
"""

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"
