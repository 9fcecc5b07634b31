"""vLLM follows the same grammars as the torch engine."""

from collections.abc import Iterator

import pytest

pytest.importorskip("vllm", reason="make test-vllm has it", exc_type=ModuleNotFoundError)

from tests.contract.constrained_answers import ConstrainedAnswers, constrained_release
from tests.vllm_fixtures import SHAPE, served

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    home = tmp_path_factory.mktemp("constrained")
    release = constrained_release(home, **SHAPE)
    with served(home, release, release) as running:
        yield running.url


class TestVllmEngine(ConstrainedAnswers):
    has_own_logprobs = False
