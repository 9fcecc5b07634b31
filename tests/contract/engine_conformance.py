"""What every engine must keep, behind the real server: one suite, run against each engine.

A test module for an engine subclasses `EngineConformance`, and gives a fixture `bench`, an
`EngineBench`. Class attributes say how much is done.
"""

import asyncio
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import pytest

from serving.weights.release_store import served_release, set_current
from tests.contract.engine_bench import (
    Cold,
    EngineBench,
    ask_list,
    ask_many,
    ask_stream,
    ask_whole,
    cached_tokens,
    check_said,
    cold_answers,
    completion_of,
    joined_stream,
    keep_asking,
    swap,
)
from tests.contract.release_faults import OF_FILES, OF_WEIGHTS
from tests.serving_fixtures import echo_app, running


class EngineConformance:
    num_clients = 4
    num_swaps = 12
    has_network = True
    """Whether the engine computes with the weights, and so has a network that they must fit."""
    has_prefix_cache = False
    """Whether the engine says how many tokens of the last of the prompts came from its cache."""

    @contextmanager
    def serving(self, bench: EngineBench) -> Iterator[str]:
        """A server whose live release is the first; its URL."""
        set_current(bench.pipeline_dir, bench.first.id)
        with running(echo_app(bench.pipeline_dir, bench.make_engine())) as url:
            yield url

    @pytest.fixture
    def cold(self, bench: EngineBench) -> dict[str, Cold]:
        async def both() -> dict[str, Cold]:
            return {
                release.id: await cold_answers(bench, release)
                for release in (bench.first, bench.second)
            }

        found = asyncio.run(both())
        first, second = found[bench.first.id], found[bench.second.id]
        for prompt in bench.prompts:
            assert first.texts[prompt] != second.texts[prompt], "the two cannot be told apart"
        return found

    def test_swaps_under_load_never_lie(self, bench: EngineBench, cold: dict[str, Cold]) -> None:
        """Whole, streamed, `n` and lists, across swaps: nothing failed, aborted or mixed."""
        stop = threading.Event()
        with (
            self.serving(bench) as url,
            httpx.Client(base_url=url, timeout=60) as http,
            ThreadPoolExecutor(self.num_clients) as pool,
        ):
            kinds = [ask_whole, ask_stream, ask_many, ask_list]
            clients = [
                pool.submit(keep_asking, http, kinds[number % len(kinds)], bench, cold, stop)
                for number in range(self.num_clients)
            ]
            try:
                for number in range(self.num_swaps):
                    release = (bench.second, bench.first)[number % 2]
                    result = swap(http, release.id)
                    assert result.status_code == 200, result.text
                    assert served_release(bench.pipeline_dir) == (bench.pipeline_dir / release.id)
                    check_said(
                        bench,
                        cold,
                        ask_whole(http, bench, bench.prompts[0]),
                        only=release.id,
                    )
            finally:
                stop.set()
            seen = [client.result() for client in clients]
        assert all(seen)
        assert set().union(*seen) == {bench.first.id, bench.second.id}

    def test_there_and_back_again(self, bench: EngineBench, cold: dict[str, Cold]) -> None:
        """A → B → A gives A's tokens again, warm prefixes and all."""
        with (
            self.serving(bench) as url,
            httpx.Client(base_url=url, timeout=60) as http,
        ):
            for release in (bench.first, bench.second, bench.first):
                assert swap(http, release.id).json()["result"] == "live"
                if self.has_prefix_cache:
                    assert cached_tokens(http, bench.prompts[-1]) == 0, "of another release"
                for prompt in bench.prompts:
                    for ask in (ask_whole, ask_stream, ask_many, ask_list):
                        check_said(bench, cold, ask(http, bench, prompt), only=release.id)
                if self.has_prefix_cache:
                    assert cached_tokens(http, bench.prompts[-1]) > 0

    def test_a_stream_ends_on_the_release_that_it_began_on(
        self, bench: EngineBench, cold: dict[str, Cold]
    ) -> None:
        prompt = bench.prompts[0]
        with (
            self.serving(bench) as url,
            httpx.Client(base_url=url, timeout=60) as http,
        ):
            body = {**completion_of(prompt), "stream": True}
            with http.stream("POST", "/v1/completions", json=body) as stream:
                lines = (line[6:] for line in stream.iter_lines() if line.startswith("data: "))
                chunks = [json.loads(next(lines))]
                with ThreadPoolExecutor(1) as pool:
                    swapping = pool.submit(swap, http, bench.second.id)
                    chunks += [json.loads(line) for line in lines if line != "[DONE]"]
                    assert swapping.result().json()["result"] == "live"
            check_said(bench, cold, joined_stream(prompt, chunks), only=bench.first.id)
            check_said(bench, cold, ask_whole(http, bench, prompt), only=bench.second.id)

    def test_a_bad_release_leaves_the_old_one(
        self, bench: EngineBench, cold: dict[str, Cold], subtests: pytest.Subtests
    ) -> None:
        """One server for all of them: each refusal leaves it as it was for the next one."""
        faults = OF_FILES | OF_WEIGHTS if self.has_network else OF_FILES
        with (
            self.serving(bench) as url,
            httpx.Client(base_url=url, timeout=60) as http,
        ):
            for name, fault in faults.items():
                with subtests.test(name):
                    bad = fault(bench.pipeline_dir, bench.second)
                    answer = swap(http, bad.release_id)
                    assert (answer.status_code, answer.json()["result"]) == (422, "refused")
                    reasons = answer.json()["reasons"]
                    assert any(all(word in each for word in bad.named) for each in reasons), reasons
                    assert served_release(bench.pipeline_dir) == bench.pipeline_dir / bench.first.id
                    said = ask_list(http, bench, bench.prompts[0])
                    check_said(bench, cold, said, only=bench.first.id)
