"""The torch engine follows grammars."""

from collections.abc import Iterator

import pytest

from serving.engines.torch_engine.engine import create_engine
from serving.weights.release_store import set_current
from tests.contract.constrained_answers import ConstrainedAnswers, constrained_release
from tests.serving_fixtures import echo_app, running


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    home = tmp_path_factory.mktemp("constrained")
    set_current(home / "releases", constrained_release(home).id)
    engine = create_engine(num_threads=1, kv_cache_bytes=64 << 20)
    with running(echo_app(home / "releases", engine)) as url:
        yield url


class TestTorchEngine(ConstrainedAnswers):
    pass
