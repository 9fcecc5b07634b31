"""Under load, all networks are swapped alike: each answer is the one that the release it names
gives alone, and none fails, also where sequences are preempted."""

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from serving.engines.settings import TorchEngineSettings
from serving.engines.torch_engine.engine import TorchEngine
from serving.weights.publish import publish_folder
from serving.weights.release_store import set_current
from tests.contract.engine_bench import swap
from tests.hub_checkpoints import store
from tests.integration.test_metrics_of_vllm import vllm_metrics
from tests.serving_fixtures import echo_app, running
from tests.torch_engine_fixtures import clear_prompt, expected

LENGTHS = (3, 20, 45, 50, 55, 60)
"""With 24 new tokens, the last four grow from one block of 64 tokens to two."""
NUM_SWAPS = 6
MAX_SWAPS = 60


def test_answers_during_swaps_are_those_of_the_release_they_name(tmp_path: Path) -> None:
    releases = tmp_path / "answers"
    networks = {}
    for number, name in enumerate(("gemma2", "mixtral")):
        network = store(name, tmp_path / f"{number}", seed=number)
        networks[publish_folder(releases, tmp_path / f"{number}").id] = network
    prompts = [clear_prompt(list(networks.values()), length, 24) for length in LENGTHS]
    wanted = {
        release_id: [expected(network, each, 24) for each in prompts]
        for release_id, network in networks.items()
    }
    set_current(releases, next(iter(wanted)))
    # Two sequences begin in these three blocks. If both grow, there is no block for the second one.
    engine = TorchEngine(TorchEngineSettings(num_threads=1, kv_cache_bytes=3 << 15))
    is_over = threading.Event()

    def ask(client: httpx.Client, number: int) -> str:
        """The release that answered."""
        body = {"prompt": list(prompts[number]), "max_tokens": 24, "temperature": 0}
        answer = client.post("/v1/completions", json={**body, "logprobs": 0})
        assert answer.status_code == 200, answer.text
        found = answer.json()
        tokens = found["choices"][0]["logprobs"]["tokens"]
        release_id: str = found["system_fingerprint"]
        assert [int(text.strip()[1:]) for text in tokens] == wanted[release_id][number]
        return release_id

    def keep_asking(url: str, number: int) -> None:
        with httpx.Client(base_url=url, timeout=60) as client:
            while not is_over.is_set():
                ask(client, number)

    with (
        running(echo_app(releases, engine, dtype="float32")) as url,
        httpx.Client(base_url=url, timeout=60) as admin,
        ThreadPoolExecutor(len(prompts)) as clients,
    ):
        asking = [clients.submit(keep_asking, url, number) for number in range(len(prompts))]
        try:
            # How often sequences are preempted depends on when they begin.
            for number, release_id in enumerate(itertools.cycle(reversed(wanted)), start=1):
                assert swap(admin, release_id).json()["result"] == "live"
                assert ask(admin, 0) == release_id
                preempted = vllm_metrics(admin)["vllm:num_preemptions_total"]
                if number >= NUM_SWAPS and preempted:
                    break
                assert number < MAX_SWAPS, "no sequence was preempted"
        finally:
            is_over.set()
        for each in asking:
            each.result()
