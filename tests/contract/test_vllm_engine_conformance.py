"""vLLM keeps what every engine must, and does right what its own reload does wrong."""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="make test-vllm has it", exc_type=ModuleNotFoundError)

from serving.weights.publish import publish_state_dict
from serving.weights.release import Release
from serving.weights.shards import read_tensors
from tests.contract.engine_bench import Cold, EngineBench
from tests.contract.engine_conformance import EngineConformance
from tests.contract.test_torch_engine_conformance import PROMPTS
from tests.swap_bytes import bytes_read, stored_bytes, with_changed
from tests.vllm_fixtures import BLOCK_TOKENS, Served, cold_of, served, vllm_release

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

USAGE = "vllm:kv_cache_usage_perc{"


class _VllmConformance(EngineConformance):
    num_clients = 4
    num_swaps = 8

    @pytest.fixture
    def bench(self, running_vllm: Served) -> EngineBench:
        return EngineBench(
            make_engine=lambda: running_vllm.engine,
            pipeline_dir=running_vllm.pipeline_dir,
            first=running_vllm.first,
            second=running_vllm.second,
            prompts=PROMPTS,
        )

    @pytest.fixture
    def cold(self, bench: EngineBench) -> dict[str, Cold]:
        return {
            release.id: cold_of(bench.pipeline_dir / release.id)
            for release in (bench.first, bench.second)
        }

    @pytest.fixture(autouse=True)
    def _keep(self, running_vllm: Served) -> None:
        self.running_vllm = running_vllm

    @contextlib.contextmanager
    def serving(self, bench: EngineBench) -> Iterator[str]:
        assert self.running_vllm.swap(bench.first.id)["result"] == "live"
        yield self.running_vllm.url


class TestTied(_VllmConformance):
    @pytest.fixture(scope="class")
    def running_vllm(self, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
        home = tmp_path_factory.mktemp("tied")
        first, second = (vllm_release(home, seed, tied=True) for seed in (1, 2))
        with served(home, first, second) as running:
            yield running

    def test_only_what_changed_is_read(self, running_vllm: Served) -> None:
        first, pipeline_dir = running_vllm.first, running_vllm.pipeline_dir
        assert running_vllm.swap(running_vllm.second.id)["result"] == "live"
        assert running_vllm.swap(first.id)["result"] == "live"
        changed = [
            "model.layers.1.self_attn.q_proj.weight",
            "model.layers.0.input_layernorm.weight",
        ]
        assert len(changed) / len(first.tensors) >= 0.1
        release, num_bytes = with_changed(pipeline_dir, first, changed)
        engine = running_vllm.engine
        assert engine.way == "copy"
        readers = (os.getpid(), *engine.pids)
        before = bytes_read(*readers)
        assert running_vllm.swap(release.id)["result"] == "live"
        plainly = bytes_read(*readers) - before
        assert engine.read_bytes[release.id] == num_bytes
        assert num_bytes + plainly <= 0.15 * stored_bytes(pipeline_dir, release)
        cold = cold_of(pipeline_dir / release.id)
        for prompt in PROMPTS:
            choice = running_vllm.completion(prompt).json()["choices"][0]
            assert choice["logprobs"]["token_logprobs"][0] == pytest.approx(
                cold.logprobs[prompt][0], abs=1e-4
            )

    def test_another_network_is_refused_with_every_difference(
        self, running_vllm: Served, tmp_path: Path
    ) -> None:
        other = vllm_release(running_vllm.pipeline_dir.parent, 3, tied=True, num_hidden_layers=1)
        result = running_vllm.swap(other.id)
        assert result["result"] == "refused"
        assert "config.json: num_hidden_layers is 1, vLLM runs 2" in result["reasons"]
        assert (
            "release.json: tensor model.layers.1.input_layernorm.weight: missing, "
            "vLLM runs float [256]"
        ) in result["reasons"]
        assert running_vllm.completion().status_code == 200

    def test_a_release_that_fails_its_probe_is_taken_back(self, running_vllm: Served) -> None:
        first, second = running_vllm.first, running_vllm.second
        assert running_vllm.swap(first.id)["result"] == "live"
        before = running_vllm.completion().json()["choices"][0]
        folder = running_vllm.pipeline_dir / second.id
        weight_map = {name: entry.file for name, entry in second.tensors.items()}
        release = publish_state_dict(
            running_vllm.pipeline_dir,
            read_tensors(folder, weight_map),
            files_dir=folder,
            probe=first.probe,
        )
        result = running_vllm.swap(release.id)
        assert result["result"] == "refused"
        assert "probe text 1" in result["reasons"][0]
        after = running_vllm.completion().json()
        assert after["system_fingerprint"] == first.id
        assert after["choices"][0] == before

    def test_a_client_that_hangs_up_frees_its_slot(self, running_vllm: Served) -> None:
        body = {"prompt": PROMPTS[0], "max_tokens": 2000, "ignore_eos": True, "n": 8}
        # A letter each time: bytes that are no character yet are no event of a stream.
        body |= {"stream": True, "logit_bias": {"65": 100}}
        with (
            running_vllm.client() as http,
            http.stream("POST", "/v1/completions", json=body) as stream,
        ):
            lines = stream.iter_lines()  # held: letting go of it hangs up
            next(lines)
            ended = time.monotonic() + 5
            while running_vllm.num_unfinished() < 8:  # the last of them may not be there yet
                assert time.monotonic() < ended
                time.sleep(0.001)
        # Long before 2,000 tokens are generated, and vLLM holds no block of theirs.
        ended = time.monotonic() + 5
        while running_vllm.num_unfinished():
            assert time.monotonic() < ended
            time.sleep(0.01)
        while not running_vllm.holds_no_blocks():
            assert time.monotonic() < ended
            time.sleep(0.01)

    def test_the_use_of_the_kv_cache_is_shown(self, running_vllm: Served) -> None:
        def shown() -> float:
            with running_vllm.client() as http:
                text = http.get("/metrics").text
            (line,) = (each for each in text.splitlines() if each.startswith(USAGE))
            return float(line.split()[-1])

        body = {"prompt": PROMPTS[0], "max_tokens": 200, "ignore_eos": True, "stream": True}
        with (
            running_vllm.client() as http,
            http.stream("POST", "/v1/completions", json=body) as stream,
        ):
            shares = [shown() for _ in stream.iter_lines()]
        assert 0 < max(shares) < 1
        ended = time.monotonic() + 5
        while shown():
            assert time.monotonic() < ended

    def test_a_prefix_is_found_again_by_its_own_release_alone(self, running_vllm: Served) -> None:
        prompt = " ".join(PROMPTS[:2]) * (2 * BLOCK_TOKENS // 10)
        prompt = prompt[: 2 * BLOCK_TOKENS + 20]

        def ask(release: Release) -> int:
            assert running_vllm.swap(release.id)["result"] == "live"
            answer = running_vllm.completion(prompt, max_tokens=1).json()
            assert answer["system_fingerprint"] == release.id
            (logprob,) = answer["choices"][0]["logprobs"]["token_logprobs"]
            cold = cold_of(running_vllm.pipeline_dir / release.id, (prompt,))
            assert logprob == pytest.approx(cold.logprobs[prompt][0], abs=1e-4)
            found: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            return found

        first, second = running_vllm.first, running_vllm.second
        asked = [ask(release) for release in (first, first, second, second, first)]
        # After a way back what is known of the old release is warm.
        whole = 2 * BLOCK_TOKENS
        assert asked == [0, whole, 0, whole, whole]

    def test_sampling_is_reproducible(self, running_vllm: Served) -> None:
        body = {"temperature": 1.0, "seed": 7, "top_p": 0.9, "n": 2}
        once, again = (running_vllm.completion(**body).json()["choices"] for _ in range(2))
        assert once == again
        assert once[0]["text"] != once[1]["text"]

    def test_scoring_a_text_generates_nothing(self, running_vllm: Served) -> None:
        body = {"max_tokens": 0, "echo": True, "logprobs": 1}
        answer = running_vllm.completion(**body).json()
        assert answer["choices"][0]["text"] == PROMPTS[0]
        assert len(answer["choices"][0]["logprobs"]["token_logprobs"]) == len(PROMPTS[0])
        assert answer["usage"]["completion_tokens"] == 0


class TestUntied(_VllmConformance):
    """Where the second release is cut into other shards."""

    @pytest.fixture(scope="class")
    def running_vllm(self, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
        home = tmp_path_factory.mktemp("untied")
        first = vllm_release(home, 1, tied=False)
        second = vllm_release(home, 2, tied=False, max_shard_bytes=33_000)
        with served(home, first, second) as running:
            yield running
