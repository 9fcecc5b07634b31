"""Settings of hypothesis for all tests.

Several tests share two cores, so an example may take any time. No test fails for its time here;
pytest's own time limit ends a test that hangs.
"""

from hypothesis import HealthCheck, settings

settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")
