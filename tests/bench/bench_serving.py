"""Serving over HTTP beside its peers, on one machine in one run: a table, and JSON.

The embedded engine and vLLM's own server answer the same prompts from the same weights; beside them
`transformers.generate` and the weight matmuls alone. Then swaps: gaps that a running stream sees,
and how long vLLM stands still, with our commit and with its own `reload_weights`.

Run from the repository's root: `make bench-serving`, or
`python -m tests.bench.bench_serving --shape 7M --clients 1 16 --tokens 64 --repeats 1`.
"""

import argparse
import asyncio
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.bench.bench_engine import SHAPES, matmuls, of_generate
from tests.stack_fixtures import free_ports

PROMPT_TOKENS = 16
CONTEXT = 1024
ADMIN_TOKEN = "bench"
START_SECONDS = 300


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, nargs="+", default=list(SHAPES))
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, default=Path("bench-serving.json"))
    options = parser.parse_args()
    found = {
        "load_before": os.getloadavg(),
        "shapes": {shape: measure(shape, options) for shape in options.shape},
        "load_after": os.getloadavg(),
    }
    options.json.write_text(json.dumps(found, indent=2))
    print(f"load {found['load_before'][0]:.1f} before, {found['load_after'][0]:.1f} after")
    print(f"written to {options.json}")


def measure(shape: str, options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        folders = publish_two(shape, home)
        found: dict[str, Any] = {}
        for engine in ("torch", "vllm-server"):
            with serving(engine, folders[0], home) as (url, start_seconds):
                found[engine] = {
                    "start_seconds": start_seconds,
                    "tokens_per_second": speeds(url, shape, options),
                }
                if engine == "torch":
                    found[engine]["swap"] = swap_under_a_stream(url, shape, folders)
        found["vllm"] = asyncio.run(swaps_of_vllm(home, folders))
        peers(shape, options, found)
    report(shape, options, found)
    return found


def publish_two(shape: str, home: Path) -> list[Path]:
    from tests.serving_fixtures import byte_tokenizer
    from tests.torch_engine_fixtures import build, llama_config, publish

    (home / "files").mkdir()
    tokenizer = byte_tokenizer()
    # Each token has a text, so that each is an event of a stream.
    tokenizer.add_tokens([f"<{number}>" for number in range(257, SHAPES[shape]["vocab_size"])])
    tokenizer.save(str(home / "files" / "tokenizer.json"))
    config = llama_config(
        **SHAPES[shape], max_position_embeddings=CONTEXT, tie_word_embeddings=True
    )
    return [publish(build(config, seed), home).folder for seed in (1, 2)]


@contextmanager
def serving(engine: str, folder: Path, home: Path) -> Iterator[tuple[str, float]]:
    """A server of its own process, and the seconds from its start to its first token."""
    (port,) = free_ports(1)
    if engine == "torch":
        program = Path(__file__).with_name("serve_program.py")
        command = [sys.executable, str(program), str(folder), str(port), ADMIN_TOKEN]
    else:
        command = [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(folder), "--served-model-name", "answers"),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--dtype", "float32", "--max-model-len", str(CONTEXT)),
            *("--skip-tokenizer-init", "--kv-cache-memory-bytes", str(1 << 30)),
        ]
    environment = {
        **os.environ,
        "PYTHONPATH": os.getcwd(),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    url = f"http://127.0.0.1:{port}"
    started = time.perf_counter()
    with (home / f"{engine}.log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        while True:
            if process.poll() is not None or time.perf_counter() - started > START_SECONDS:
                sys.exit((home / f"{engine}.log").read_text()[-4000:])
            try:
                ask(url, [1, 2, 3], 1)
                break
            except httpx.HTTPError:
                time.sleep(0.05)
        yield url, time.perf_counter() - started
    finally:
        process.terminate()
        process.wait(timeout=60)


def ask(url: str, prompt: list[int], max_tokens: int) -> None:
    answer = httpx.post(
        f"{url}/v1/completions",
        json={
            "model": "answers",
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
        },
        timeout=600,
    )
    answer.raise_for_status()
    assert answer.json()["usage"]["completion_tokens"] == max_tokens


def prompt_of(shape: str, seed: int) -> list[int]:
    return [(7 * seed + 13 * place) % 250 for place in range(PROMPT_TOKENS)]


def speeds(url: str, shape: str, options: argparse.Namespace) -> dict[str, float]:
    found = {}
    for clients in options.clients:
        for tokens in options.tokens:
            seconds = []
            with ThreadPoolExecutor(clients) as pool:
                for repeat in range(options.repeats + 1):
                    started = time.perf_counter()
                    asked = [
                        # Other prompts each time: nobody is to answer from its prefix cache.
                        pool.submit(ask, url, prompt_of(shape, 97 * repeat + number), tokens)
                        for number in range(clients)
                    ]
                    for each in asked:
                        each.result()
                    seconds.append(time.perf_counter() - started)
            # The first round warms up.
            found[f"{clients}x{tokens}"] = clients * tokens / min(seconds[1:])
    return found


def swap_under_a_stream(url: str, shape: str, folders: list[Path]) -> dict[str, Any]:
    """Gaps between the tokens of one stream, while the release is swapped four times."""
    moments = []
    body = {"prompt": prompt_of(shape, 5), "max_tokens": 500, "ignore_eos": True, "stream": True}
    results = []
    with ThreadPoolExecutor(1) as pool, httpx.Client(base_url=url, timeout=600) as http:

        def swap_all() -> None:
            for number in range(4):
                answer = httpx.post(
                    f"{url}/admin/swap",
                    json={"release": folders[(number + 1) % 2].name},
                    headers={"Authorization": f"Bearer {ADMIN_TOKEN}"},
                    timeout=600,
                )
                results.append(answer.json())

        with http.stream("POST", "/v1/completions", json=body) as stream:
            for line in stream.iter_lines():
                if line.startswith("data: {"):
                    moments.append(time.perf_counter())
                    if len(moments) == 50:
                        swapping = pool.submit(swap_all)
        swapping.result()
    gaps = [after - before for before, after in itertools.pairwise(moments)]
    assert {result["result"] for result in results} == {"live"}
    return {
        "median_gap_seconds": statistics.median(gaps),
        "quiet_gap_seconds": max(gaps[:45]),
        "largest_gap_seconds": max(gaps[50:]),
        "phases": results[0]["seconds"],
    }


async def swaps_of_vllm(home: Path, folders: list[Path]) -> dict[str, Any]:
    """Seconds in which vLLM computes nothing: our commit beside vLLM's `reload_weights`."""
    from serving.engine import Generation
    from serving.engines.vllm_engine import create_engine
    from serving.weights.releases import load_release

    engine = create_engine(dtype="float32", kv_cache_bytes=1 << 30)
    releases = [load_release(folder) for folder in folders]
    started = time.perf_counter()

    async def first_token(release_id: str) -> float:
        asked = time.perf_counter()
        prompt = tuple(prompt_of("", 3))
        async for _ in engine.generate(
            release_id, Generation(prompt=prompt, max_tokens=1, temperature=0.0)
        ):
            return time.perf_counter() - asked
        raise AssertionError("no token")

    await engine.stage(releases[0], folders[0])
    await engine.commit(releases[0].id)
    await first_token(releases[0].id)
    found: dict[str, Any] = {"start_seconds": time.perf_counter() - started}
    stages, commits, firsts = [], [], []
    for number in range(1, 7):
        release = releases[number % 2]
        moments = [time.perf_counter()]
        await engine.stage(release, folders[number % 2])
        moments.append(time.perf_counter())
        await engine.commit(release.id)
        moments.append(time.perf_counter())
        firsts.append(await first_token(release.id))
        await engine.unload(releases[(number + 1) % 2].id)
        stages.append(moments[1] - moments[0])
        commits.append(moments[2] - moments[1])
    process = engine.process
    assert process is not None and process.way == "copy"
    found["copy"] = {
        "stage_seconds": statistics.median(stages),
        "pause_seconds": statistics.median(commits),
        "first_token_seconds": statistics.median(firsts),
    }
    # Last: it overwrites what our commits share.
    reloads = []
    for number in range(1, 7):
        before = time.perf_counter()
        await process.call("reload_weights", None, str(folders[number % 2]))
        reloads.append(time.perf_counter() - before)
    found["reload_weights"] = {"pause_seconds": statistics.median(reloads)}
    await engine.close()
    return found


def peers(shape: str, options: argparse.Namespace, found: dict[str, Any]) -> None:
    import torch

    from tests.torch_engine_fixtures import build, llama_config

    torch.set_num_threads(os.cpu_count() or 1)
    network = build(
        llama_config(**SHAPES[shape], max_position_embeddings=CONTEXT, tie_word_embeddings=True)
    )
    found["generate"] = {
        str(clients): of_generate(network, clients, options.repeats) for clients in options.clients
    }
    found["matmuls"] = {
        str(clients): matmuls(network, clients, options.repeats) for clients in options.clients
    }


def report(shape: str, options: argparse.Namespace, found: dict[str, Any]) -> None:
    ours, theirs = (found[name]["tokens_per_second"] for name in ("torch", "vllm-server"))
    print(f"\n{shape}: tokens/s over HTTP, best of {options.repeats}")
    print("clients x tokens   ours   vLLM  ratio  generate  F.linear  packed")
    for clients in options.clients:
        for tokens in options.tokens:
            key = f"{clients}x{tokens}"
            plain, packed = found["matmuls"][str(clients)]
            print(
                f"{key:>16} {ours[key]:>6.0f} {theirs[key]:>6.0f} {ours[key] / theirs[key]:>6.2f} "
                f"{found['generate'][str(clients)]:>9.0f} {plain:>9.0f} {packed:>7.0f}"
            )
    starts = {name: found[name]["start_seconds"] for name in ("torch", "vllm-server", "vllm")}
    print("start until the first token: " + ", ".join(f"{n} {s:.1f} s" for n, s in starts.items()))
    swap = found["torch"]["swap"]
    print(
        f"stream across 4 swaps (torch): gap {1e3 * swap['median_gap_seconds']:.1f} ms median, "
        f"{1e3 * swap['quiet_gap_seconds']:.1f} ms largest before, "
        f"{1e3 * swap['largest_gap_seconds']:.1f} ms largest during"
    )
    copy, reload = found["vllm"]["copy"], found["vllm"]["reload_weights"]
    print(
        f"swap on vLLM: staged in {1e3 * copy['stage_seconds']:.0f} ms beside requests, engine "
        f"pause {1e3 * copy['pause_seconds']:.1f} ms, first token "
        f"{1e3 * copy['first_token_seconds']:.1f} ms after; its own reload_weights pauses "
        f"{1e3 * reload['pause_seconds']:.0f} ms"
    )


if __name__ == "__main__":
    main()
