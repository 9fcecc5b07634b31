"""The slower way of a swap on vLLM: its own reload."""

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("vllm", reason="make test-vllm has it", exc_type=ModuleNotFoundError)

from serving.weights.publish import publish_state_dict
from serving.weights.release import Release
from serving.weights.shards import read_tensors
from tests.contract.test_torch_engine_conformance import PROMPTS
from tests.vllm_fixtures import Served, cold_of, served, vllm_release

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


class TestReload:
    """The slower way: vLLM's own reload, from memory."""

    @pytest.fixture(scope="class")
    def running_vllm(self, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
        home = tmp_path_factory.mktemp("reload")
        first, second = (vllm_release(home, seed, tied=True) for seed in (1, 2))
        with served(home, first, second, way="reload") as running:
            yield running

    def check(self, running_vllm: Served, release: Release) -> None:
        cold = cold_of(running_vllm.pipeline_dir / release.id)
        for prompt in PROMPTS:
            answer = running_vllm.completion(prompt).json()
            assert answer["system_fingerprint"] == release.id
            (choice,) = answer["choices"]
            assert choice["text"] == cold.texts[prompt]
            assert choice["logprobs"]["token_logprobs"] == pytest.approx(
                cold.logprobs[prompt], abs=1e-4
            )

    def test_there_and_back_again(self, running_vllm: Served) -> None:
        """With a tied head, which vLLM alone would leave as it was."""
        assert running_vllm.engine.way == "reload"
        for release in (running_vllm.second, running_vllm.first, running_vllm.second):
            assert running_vllm.swap(release.id)["result"] == "live"
            self.check(running_vllm, release)

    def test_after_a_refused_probe_the_old_weights_are_read_again(
        self, running_vllm: Served
    ) -> None:
        first, second = running_vllm.first, running_vllm.second
        assert running_vllm.swap(first.id)["result"] == "live"
        folder = running_vllm.pipeline_dir / second.id
        release = publish_state_dict(
            running_vllm.pipeline_dir,
            read_tensors(folder, {name: each.file for name, each in second.tensors.items()}),
            files_dir=folder,
            probe=first.probe,
        )
        result = running_vllm.swap(release.id)
        assert (result["result"], result["phase"]) == ("refused", "probe")
        self.check(running_vllm, first)

    def test_a_reload_that_throws_midway_ends_the_engine(
        self, running_vllm: Served, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The worker is given tensors of another network, which only its reload can notice."""
        first, second = running_vllm.first, running_vllm.second
        assert running_vllm.swap(first.id)["result"] == "live"
        other = vllm_release(running_vllm.pipeline_dir.parent, 3, tied=True, intermediate_size=320)
        call = running_vllm.engine._call

        async def misled(method: str, *arguments: Any) -> list[Any]:
            if method == "hotpush_stage":
                changed = {name: (each.file, each.digest) for name, each in other.tensors.items()}
                folder = running_vllm.pipeline_dir / other.id
                arguments = (arguments[0], str(folder), changed)
            return await call(method, *arguments)

        monkeypatch.setattr(running_vllm.engine, "_call", misled)
        result = running_vllm.swap(second.id)
        assert (result["result"], result["phase"]) == ("failed", "commit")
        with running_vllm.client() as http:
            answer = http.get("/live").json()
        assert answer["status"] == "dead" and "may be mixed" in answer["reason"]
