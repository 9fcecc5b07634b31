"""What is not staged, and the reason that is given."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import FalconH1Config, GPT2Config, MambaConfig, PreTrainedConfig

from serving.engines.torch_engine import generic, staging
from serving.errors import ReleaseError
from serving.weights.publish import manifest_of_folder, publish_folder
from serving.weights.verify import verify_release
from tests.torch_engine_fixtures import (
    Published,
    ask,
    build,
    changed,
    engine_with,
    expected,
    first,
    greedy,
    llama_config,
    nudge,
    prompt,
    tokens,
)

__all__ = ["first"]


def edit_config(**changes: Any) -> Callable[[Published], Published]:
    def edit(published: Published) -> Published:
        path = published.folder / "config.json"
        config = {**json.loads(path.read_text()), **changes}
        path.write_text(json.dumps(config))
        return published

    return edit


def without(name: str) -> Callable[[Published], Published]:
    def edit(published: Published) -> Published:
        tensors = dict(published.release.tensors)
        del tensors[name]
        return Published(
            network=published.network,
            release=published.release.model_copy(update={"tensors": tensors}),
            folder=published.folder,
        )

    return edit


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (without("model.norm.weight"), "tensor model.norm.weight: in no shard"),
        (
            edit_config(num_hidden_layers=1),
            r"model\.safetensors: tensor model.layers.1.mlp.up_proj.weight: the network .* no such",
        ),
        (edit_config(tie_word_embeddings=False), None),
        (edit_config(quantization_config={"bits": 4}), "quantised"),
    ],
)
async def test_a_bad_release_is_refused_with_file_and_tensor(
    harm: Callable[[Published], Published], reason: str | None, first: Published, tmp_path: Path
) -> None:
    bad = harm(
        changed(
            first.network, tmp_path / "bad", nudge("model.norm.weight", "model.embed_tokens.weight")
        )
    )
    async with engine_with(first) as engine:
        if reason is None:
            # The manifest says what the head is tied to, whatever the configuration says.
            await engine.stage(bad.release, bad.folder)
            await engine.unload(bad.id)
        else:
            with pytest.raises(ReleaseError, match=reason):
                await engine.stage(bad.release, bad.folder)
            assert list(engine.residents) == [first.id]
        answer = tokens(await ask(engine, first.id, greedy(prompt(5))))
    assert answer == expected(first.network, prompt(5))


TIED = {
    "llama": llama_config(tie_word_embeddings=True),
    "gpt2": GPT2Config(
        vocab_size=211, n_embd=64, n_layer=2, n_head=4, n_positions=128, initializer_range=0.3
    ),
}


def saved_by_torch(network: Any, home: Path) -> Published:
    """As some programs save one: beside its embedding, the head has a tensor of its own."""
    source = home / "checkpoint"
    source.mkdir(parents=True)
    network.config.architectures = [type(network).__name__]
    network.config.save_pretrained(source)
    state = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    torch.save(state, source / "pytorch_model.bin")
    release = publish_folder(home / "releases", source)
    return Published(network=network, release=release, folder=home / "releases" / release.id)


@pytest.mark.parametrize("name", TIED)
async def test_a_tied_head_may_be_stored_if_it_is_the_embedding(name: str, tmp_path: Path) -> None:
    published = saved_by_torch(build(TIED[name]), tmp_path)
    assert "lm_head.weight" in published.release.tensors
    assert verify_release(published.folder) == ()
    async with engine_with(published) as engine:
        answer = tokens(await ask(engine, published.id, greedy(prompt(5))))
    assert answer == expected(published.network, prompt(5))


def test_a_stored_head_that_is_not_what_it_is_tied_to_is_refused(tmp_path: Path) -> None:
    """Before anything is staged, whether the folder is published or served as it is."""
    network: Any = build(TIED["llama"])
    source = tmp_path / "checkpoint"
    network.save_pretrained(source)
    state = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    state["lm_head.weight"] += 1
    save_file(state, source / "model.safetensors", metadata={"format": "pt"})
    for read in (
        lambda: manifest_of_folder(source, "answers"),
        lambda: publish_folder(tmp_path / "releases", source),
    ):
        with pytest.raises(
            ReleaseError, match=r"\.safetensors: tensor lm_head.*: differs from .*config\.json ties"
        ):
            read()


async def test_a_head_that_is_missing_is_no_tie(tmp_path: Path) -> None:
    """Silence means for a Llama that nothing is tied: nothing goes live with the embedding as its
    head."""
    network = build(llama_config())
    source = tmp_path / "checkpoint"
    network.save_pretrained(source)
    (source / "model.safetensors").unlink()
    state = {name: each for name, each in network.state_dict().items() if name != "lm_head.weight"}
    save_file(state, source / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    del config["tie_word_embeddings"]
    (source / "config.json").write_text(json.dumps(config))

    with pytest.raises(ReleaseError, match=r"tensor lm_head\.weight: in no shard"):
        publish_folder(tmp_path / "releases", source)
    async with engine_with() as engine:
        with pytest.raises(ReleaseError, match=r"tensor lm_head\.weight: in no shard"):
            await engine.stage(manifest_of_folder(source, "answers"), source)


async def test_every_reason_is_given_at_once(first: Published) -> None:
    bad = without("model.norm.weight")(edit_config(intermediate_size=100)(first))
    async with engine_with() as engine:
        with pytest.raises(ReleaseError) as raised:
            await engine.stage(bad.release, bad.folder)
    assert len(raised.value.reasons) == 1 + 2 * 3


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"memory_reserve_bytes": 310 << 20}, r"too little memory.*314572800 are free"),
        (
            {"kv_cache_bytes": 65535, "max_context": 128},
            "one sequence of 128 tokens needs 65536 bytes",
        ),
    ],
)
async def test_too_little_memory_is_found_before_anything_is_read(
    first: Published, monkeypatch: pytest.MonkeyPatch, settings: dict[str, int], reason: str
) -> None:
    monkeypatch.setattr(staging, "free_bytes", lambda: 300 << 20)
    monkeypatch.setattr(staging, "read_tensors", None)
    async with engine_with(**settings) as engine:
        with pytest.raises(ReleaseError, match=reason):
            await engine.stage(first.release, first.folder)


async def test_memory_that_the_live_release_may_still_take_is_not_free(
    first: Published, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = changed(first.network, tmp_path / "b", nudge("model.norm.weight"))
    # 8 MiB of keys and values for each release: 128 slots of two blocks of 32 KiB.
    monkeypatch.setattr(staging, "free_bytes", lambda: 64 << 20)
    for reserve, fits in ((49 << 20, False), (47 << 20, True)):
        async with engine_with(memory_reserve_bytes=reserve) as engine:
            await engine.stage(first.release, first.folder)
            await engine.commit(first.id)
            await ask(engine, first.id, greedy(prompt(60), max_tokens=1))
            if fits:
                await engine.stage(second.release, second.folder)
                continue
            # One block of them has been taken.
            with pytest.raises(ReleaseError, match=r"other releases may still take 8355840\."):
                await engine.stage(second.release, second.folder)


@pytest.mark.parametrize(
    ("settings", "context"),
    # 512 bytes a token, in whole pages of each head: there is room for one block of 64.
    [({}, 128), ({"max_context": 40}, 40), ({"kv_cache_bytes": 65535}, 64)],
)
async def test_a_context_that_does_not_fit_is_lowered_to_one_that_does(
    first: Published, settings: dict[str, int], context: int
) -> None:
    async with engine_with(first, **settings) as engine:
        assert engine.max_context(first.release.id) == context


@pytest.mark.parametrize(
    "config",
    [
        MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, state_size=4),
        FalconH1Config(vocab_size=64, hidden_size=32, num_hidden_layers=1),
    ],
    ids=["alone", "beside attention"],
)
def test_a_network_that_keeps_a_state_is_refused(config: PreTrainedConfig, tmp_path: Path) -> None:
    config.save_pretrained(tmp_path)
    with pytest.raises(ReleaseError, match=r"keeps a state for each sequence.*vLLM may serve it"):
        generic.layer_shapes(tmp_path)
