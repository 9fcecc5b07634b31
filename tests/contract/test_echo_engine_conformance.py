"""The echo engine, holding two releases or one, keeps what every engine must."""

from pathlib import Path

import pytest

from tests.contract.engine_bench import EngineBench
from tests.contract.engine_conformance import EngineConformance
from tests.echo_engine import EchoEngine
from tests.serving_fixtures import echo_release


class TestEchoEngine(EngineConformance):
    has_network = False

    @pytest.fixture(params=[True, False], ids=["holds two", "in place"])
    def bench(self, request: pytest.FixtureRequest, tmp_path: Path) -> EngineBench:
        pipeline_dir = tmp_path / "answers"
        return EngineBench(
            make_engine=lambda: EchoEngine(holds_two=request.param, step_seconds=0.001),
            pipeline_dir=pipeline_dir,
            first=echo_release(pipeline_dir, 1),
            second=echo_release(pipeline_dir, 2, max_shard_bytes=100),
            prompts=("Hello", "What is new?", "Grüße"),
        )
