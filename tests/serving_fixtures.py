"""Tiny models, releases and running servers for the tests of the serving room."""

import contextlib
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from fastapi import FastAPI
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from serving.admission import LoadedRelease
from serving.app import bind, create_app
from serving.engine import Engine
from serving.follow import Follower
from serving.http.server import Limits, Server
from serving.settings import ServingSettings
from serving.tokenizer import load_tokenizer
from serving.weights.publish import MAX_SHARD_BYTES, publish_state_dict
from serving.weights.release import Lineage, Probe, ProbeText, Release, tensor_digest
from tests.echo_engine import EchoEngine, echo_logprobs

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

torch.set_num_threads(1)


def tiny_llama(*, tied: bool = True, seed: int = 0) -> "LlamaForCausalLM":
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=257,  # as many as `byte_tokenizer` has
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config).eval()


def save_config(model: "LlamaForCausalLM", folder: Path) -> Path:
    """Config files without weights, as a trainer has them beside its weights in memory."""
    folder.mkdir(parents=True, exist_ok=True)
    model.config.save_pretrained(folder)
    return folder


ADMIN_TOKEN = "admin-secret"
EOS = 256
CONTEXT = 128
PROBE_TOKENS = ((72, 101, 108, 108, 111), (1, 2, 3, 4, 5, 6, 7))
CHAT_TEMPLATE = (
    "{% if messages[0].role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def byte_tokenizer(*special: str) -> Tokenizer:
    """Byte-level BPE without merges: a token for each byte, so that characters are cut. The
    `special` tokens take the places of the last bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[: EOS - len(special)]
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in (*special, "<eos>")])
    return tokenizer


def echo_release(
    pipeline_dir: Path,
    seed: int,
    *,
    bounds: dict[str, float] | None = None,
    probe_shift: float = 0.0,
    chat_template: str | None = None,
    tokenizer: Tokenizer | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    context: int = CONTEXT,
    **more: Any,
) -> Release:
    """A release for the echo engine; its probe is right, or off by `probe_shift`. `more` is for its
    lineage."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {f"layer.{n}.weight": torch.rand(4, 4, generator=generator) for n in range(3)}
    known = {"dataset": "me/facts", "dataset_revision": f"{seed:040x}", "job_id": f"job-{seed}"}
    lineage = Lineage(**{**known, **more})
    with tempfile.TemporaryDirectory() as name:
        files_dir = Path(name) / "files"
        files_dir.mkdir()
        config = {
            "model_type": "echo",
            "vocab_size": 257,
            "max_position_embeddings": context,
            "eos_token_id": EOS,
        }
        (files_dir / "config.json").write_text(json.dumps(config))
        (tokenizer or byte_tokenizer()).save(str(files_dir / "tokenizer.json"))
        if chat_template is not None:
            (files_dir / "chat_template.jinja").write_text(chat_template)
        digests = {
            each: tensor_digest(tensor.numpy().tobytes()) for each, tensor in tensors.items()
        }
        texts = tuple(
            ProbeText(
                token_ids=tokens,
                logprobs=tuple(value + probe_shift for value in echo_logprobs(digests, tokens)),
            )
            for tokens in PROBE_TOKENS
        )
        return publish_state_dict(
            pipeline_dir,
            tensors,
            files_dir=files_dir,
            lineage=lineage,
            probe=Probe(dtype="float32", texts=texts, bounds=bounds or {"float32": 1e-4}),
            max_shard_bytes=max_shard_bytes,
        )


def network_release(pipeline_dir: Path, seed: int) -> Release:
    """A release without a probe, for the torch engine."""
    network = tiny_llama(seed=seed)
    with tempfile.TemporaryDirectory() as name:
        files_dir = save_config(network, Path(name))
        byte_tokenizer().save(str(files_dir / "tokenizer.json"))
        state = network.state_dict(keep_vars=True)
        return publish_state_dict(pipeline_dir, state, files_dir=files_dir)


def live_release(release: Release, folder: Path) -> LoadedRelease:
    tokenizer = load_tokenizer(folder)
    return LoadedRelease(
        release=release,
        folder=folder,
        tokenizer=tokenizer,
        context_length=tokenizer.context_length,
    )


def echo_app(
    pipeline_dir: Path,
    engine: Engine | None = None,
    *,
    folder: Path | None = None,
    job_may_swap: Callable[[str], bool] = lambda token: False,
    pipeline: str = "answers",
    follower: Follower | None = None,
    **settings: Any,
) -> FastAPI:
    return create_app(
        engine=engine or EchoEngine(),
        settings=ServingSettings(port=0, **settings),
        pipeline_dir=pipeline_dir,
        pipeline=pipeline,
        admin_token=ADMIN_TOKEN,
        job_may_swap=job_may_swap,
        folder=folder,
        follower=follower,
    )


@contextlib.contextmanager
def running(
    app: FastAPI, limits: Limits | None = None, loop: Literal["auto", "asyncio"] = "auto"
) -> Iterator[str]:
    """A real server on a free port, for the block; its URL.

    loop: a server that follows must use asyncio, because it starts processes, as the test's hub
    does: two loops of uvloop in one process refuse to start one at the same time, and then never
    close.
    """
    listener = bind(ServingSettings(port=0))
    server = Server(app, shutdown_seconds=10, limits=limits, lifespan="on")
    server.config.loop = loop
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


@contextlib.contextmanager
def server_process(*arguments: str, **options: Any) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A server in a process of its own, by this Python; the URL, which it prints first."""
    command = [sys.executable, *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().split()[-1], process
    finally:
        process.terminate()
        process.communicate()
