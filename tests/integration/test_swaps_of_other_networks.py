"""Under load, networks that run through `transformers` are swapped as Llama is: each answer is the
one that the release it names gives alone, and none fails."""

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from serving.engines.torch_engine.engine import TorchEngine
from serving.engines.torch_engine.settings import TorchEngineSettings
from serving.weights.publish import publish_folder
from serving.weights.release_store import set_current
from tests.hub_checkpoints import store
from tests.serving_fixtures import ADMIN_TOKEN, echo_app, running
from tests.torch_engine_fixtures import clear_prompt, expected

LENGTHS = (3, 20, 33, 50)
NUM_SWAPS = 6


@pytest.mark.parametrize(
    ("first", "second"), [("gpt2", "gpt2"), ("gemma2", "mixtral")], ids=["alike", "others"]
)
def test_answers_during_swaps_are_those_of_the_release_they_name(
    first: str, second: str, tmp_path: Path
) -> None:
    releases = tmp_path / "answers"
    networks = {}
    for number, name in enumerate((first, second)):
        network = store(name, tmp_path / f"{number}", seed=number)
        networks[publish_folder(releases, tmp_path / f"{number}").id] = network
    prompts = [clear_prompt(list(networks.values()), length, 24) for length in LENGTHS]
    wanted = {
        release_id: [expected(network, each, 24) for each in prompts]
        for release_id, network in networks.items()
    }
    set_current(releases, next(iter(wanted)))
    # Room for few sequences: they wait for one another, and give way.
    engine = TorchEngine(TorchEngineSettings(num_threads=1, kv_cache_bytes=1 << 17))
    is_over = threading.Event()

    def ask(url: str, number: int) -> set[str]:
        seen = set()
        with httpx.Client(base_url=url, timeout=60) as client:
            while not is_over.is_set():
                body = {"prompt": list(prompts[number]), "max_tokens": 24, "temperature": 0}
                answer = client.post("/v1/completions", json={**body, "logprobs": 0})
                assert answer.status_code == 200, answer.text
                found = answer.json()
                tokens = found["choices"][0]["logprobs"]["tokens"]
                ids = [int(text.strip()[1:]) for text in tokens]
                assert ids == wanted[found["system_fingerprint"]][number]
                seen.add(found["system_fingerprint"])
        return seen

    with (
        running(echo_app(releases, engine, dtype="float32")) as url,
        ThreadPoolExecutor(len(prompts)) as clients,
    ):
        asking = [clients.submit(ask, url, number) for number in range(len(prompts))]
        try:
            for release_id in itertools.islice(itertools.cycle(reversed(wanted)), NUM_SWAPS):
                answer = httpx.post(
                    f"{url}/admin/swap",
                    json={"release": release_id},
                    headers={"Authorization": f"Bearer {ADMIN_TOKEN}"},
                    timeout=60,
                )
                assert answer.json()["result"] == "live", answer.text
        finally:
            is_over.set()
        assert set().union(*(each.result() for each in asking)) == set(wanted)
