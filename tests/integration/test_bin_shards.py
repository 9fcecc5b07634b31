"""`.bin` shards are converted once: when a folder is published, or when a server serves it."""

import asyncio
import json
import os
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from serving import converted
from serving.converted import ConvertedCopies
from serving.engines.torch_engine.engine import create_engine
from serving.errors import ReleaseError
from serving.weights import release_removal, shards
from serving.weights.checkpoint_folder import manifest_of_folder
from serving.weights.index import BIN_INDEX_FILE, INDEX_FILE
from serving.weights.publish import publish_folder, publish_state_dict
from serving.weights.release import Release, tensor_digest
from serving.weights.release_store import CONVERTED, list_releases, set_current
from serving.weights.verify import verify_release
from tests.bin_fixtures import Trap, as_old_release, bin_folder, network
from tests.contract.engine_bench import swap
from tests.contract.test_torch_engine_conformance import torch_release
from tests.serving_fixtures import byte_tokenizer, echo_app, echo_release, running
from tests.torch_engine_fixtures import clear_prompt, expected

MAX_TOKENS = 8


def publish(tmp_path: Path, source: Path) -> tuple[Path, Release]:
    release = publish_folder(tmp_path / "answers", source)
    return tmp_path / "answers" / release.id, release


def copies(pipeline_dir: Path) -> set[Path]:
    """The folders of all copies that a server has made."""
    return set((pipeline_dir / CONVERTED).glob("r*/r*"))


@contextmanager
def served(pipeline_dir: Path, folder: Path | None = None) -> Iterator[httpx.Client]:
    engine = create_engine(num_threads=1, kv_cache_bytes=64 << 20)
    with (
        running(echo_app(pipeline_dir, engine, folder=folder)) as url,
        httpx.Client(base_url=url, timeout=60) as http,
    ):
        yield http


def answer(http: httpx.Client, prompt: str | tuple[int, ...] = "Hello") -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}
    response = http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


@pytest.fixture
def no_conversion(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("converted again")

    return lambda: monkeypatch.setattr(converted, "publish_state_dict", refuse)


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_published_folder_has_safetensors_shards(
    tmp_path: Path, num_shards: int, tied: bool, dtype: torch.dtype
) -> None:
    original = network(tied=tied, dtype=dtype)
    source = bin_folder(tmp_path / "checkpoint", original, num_shards=num_shards)
    (source / "training_args.bin").write_bytes(b"a pickle that nobody asked for")
    folder, release = publish(tmp_path, source)
    assert INDEX_FILE in release.files
    assert not any("pytorch_model" in name or name.endswith(".bin") for name in release.files)
    assert {path.name for path in folder.iterdir()} == {*release.files, "release.json"}
    assert verify_release(folder) == ()
    # The embedding is the name that is stored, although the head comes first in the index.
    assert release.tied == ({"lm_head.weight": "model.embed_tokens.weight"} if tied else {})
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).state_dict()
    for name, tensor in original.state_dict().items():
        assert loaded[name].dtype == dtype and torch.equal(loaded[name], tensor)


def test_a_view_of_a_larger_tensor_is_stored_alone(tmp_path: Path) -> None:
    """Tensors that share memory but differ in shape are no tie."""
    source = bin_folder(tmp_path / "checkpoint", network(), num_shards=1)
    (source / "config.json").write_text('{"model_type": "echo"}')
    whole = torch.arange(60_000).float().reshape(200, 300)
    state = {"whole": whole, "turned": whole.T, "part": whole[:1], "tail": whole[150:, 7]}
    torch.save(state, source / "pytorch_model.bin")
    folder, release = publish(tmp_path, source)
    assert release.tensors.keys() == state.keys() and release.tied == {}
    weight_map = {name: entry.file for name, entry in release.tensors.items()}
    for name, tensor in shards.read_tensors(folder, weight_map).items():
        assert torch.equal(tensor, state[name])


def test_shards_from_before_torch_1_6_are_published_too(tmp_path: Path) -> None:
    original = network()
    source = bin_folder(tmp_path / "checkpoint", original, num_shards=1)
    torch.save(
        original.state_dict(),
        source / "pytorch_model.bin",
        _use_new_zipfile_serialization=False,
    )
    folder, release = publish(tmp_path, source)
    for name, tensor in tensors_of(folder, release).items():
        assert torch.equal(tensor, original.state_dict()[name])


def test_safetensors_are_preferred_to_pickles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a repository of the Hub that has both."""
    model = network()
    source = bin_folder(tmp_path / "checkpoint", model)
    model.save_pretrained(source)
    monkeypatch.setattr(torch, "load", None)
    _, release = publish(tmp_path, source)
    assert release.tensors.keys() == model.state_dict().keys()


@pytest.mark.parametrize("num_shards", [1, 2])
@pytest.mark.parametrize("way", ["publish", "serve"])
@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "before torch 1.6"])
def test_code_in_a_pickle_does_not_run(
    tmp_path: Path, num_shards: int, way: str, is_zip: bool
) -> None:
    source = bin_folder(tmp_path / "checkpoint", network(), num_shards=num_shards)
    shard = max(source.glob("*.bin"))
    state = {"lm_head.weight": Trap(tmp_path / "trap")}
    torch.save(state, shard, _use_new_zipfile_serialization=is_zip)
    refused = pytest.raises(ReleaseError, match=rf"{shard.name}: refused .*could run code")
    if way == "publish":
        with refused:
            publish(tmp_path, source)
    else:
        with refused:
            start(tmp_path / "answers", source)
        assert copies(tmp_path / "answers") == set()
    assert not (tmp_path / "trap").exists()
    assert list_releases(tmp_path / "answers") == []


def start(pipeline_dir: Path, folder: Path) -> None:
    """Start a server in this thread, which gets the error if the server cannot start."""
    app = echo_app(pipeline_dir, folder=folder)

    async def whole() -> None:
        async with app.router.lifespan_context(app):
            pass

    asyncio.run(whole())


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def replace_by_text(path: Path) -> None:
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")


def lose_the_pickle(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"data.pkl", b"data.pkk"))


def store_a_list(path: Path) -> None:
    torch.save([torch.ones(2)], path)


def store_a_number(path: Path) -> None:
    torch.save({"lm_head.weight": 1}, path)


def replace_the_pickle(path: Path, pickled: bytes) -> None:
    """Keep the tensors of the shard, but not the pickle that names them."""
    with zipfile.ZipFile(path) as shard:
        held = {each.filename: shard.read(each) for each in shard.infolist()}
    with zipfile.ZipFile(path, "w") as shard:
        for name, content in held.items():
            shard.writestr(name, pickled if name.endswith("data.pkl") else content)


def end_before_the_start(path: Path) -> None:
    replace_the_pickle(path, b".")  # torch raises IndexError


def name_a_storage_by_a_number(path: Path) -> None:
    replace_the_pickle(path, b"\x80\x02K\x01Q.")  # torch raises AssertionError


def rebuild_a_tensor_from_nothing(path: Path) -> None:
    # torch raises TypeError
    replace_the_pickle(path, b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n)R.")


@pytest.mark.parametrize(
    "damage",
    [
        truncate,
        empty,
        replace_by_text,
        lose_the_pickle,
        store_a_list,
        store_a_number,
        Path.unlink,
        end_before_the_start,
        name_a_storage_by_a_number,
        rebuild_a_tensor_from_nothing,
    ],
)
def test_a_damaged_shard_is_named(tmp_path: Path, damage: Callable[[Path], object]) -> None:
    source = bin_folder(tmp_path / "checkpoint", network())
    shard = source / "pytorch_model-00002-of-00002.bin"
    damage(shard)
    with pytest.raises(ReleaseError, match=rf"^{shard.name}: "):
        publish(tmp_path, source)
    assert list_releases(tmp_path / "answers") == []


def test_index_and_shards_must_name_the_same_tensors(tmp_path: Path) -> None:
    source = bin_folder(tmp_path / "checkpoint", network())
    path = source / BIN_INDEX_FILE
    index = json.loads(path.read_text())
    shard = index["weight_map"].pop("model.norm.weight")
    index["weight_map"]["surplus.weight"] = shard
    path.write_text(json.dumps(index))
    with pytest.raises(ReleaseError) as raised:
        publish(tmp_path, source)
    assert raised.value.reasons == (
        f"{shard}: tensor surplus.weight: in the index, not in the shard",
        f"{shard}: tensor model.norm.weight: in the shard, not in the index",
    )


@pytest.mark.parametrize("num_shards", [1, 2])
def test_a_folder_is_converted_once_and_then_served(
    tmp_path: Path, num_shards: int, no_conversion: Callable[[], None]
) -> None:
    original = network()
    prompt = clear_prompt([original], 5, MAX_TOKENS)
    right = byte_tokenizer().decode(expected(original, prompt, MAX_TOKENS))
    source = bin_folder(tmp_path / "checkpoint", original, num_shards=num_shards)
    before = {path: path.stat().st_mtime_ns for path in source.iterdir()}
    pipeline_dir = tmp_path / "releases" / "answers"
    for _ in range(2):
        with served(pipeline_dir, source) as http:
            found = answer(http, prompt)
            assert found["choices"][0]["text"] == right
            assert found["system_fingerprint"].startswith("r000000-")
            assert http.get("/v1/models").json()["data"][0]["root"] == str(source)
        no_conversion()
    assert {path: path.stat().st_mtime_ns for path in source.iterdir()} == before
    assert len(copies(pipeline_dir)) == 1
    assert list_releases(pipeline_dir) == []


def test_a_folder_that_has_changed_is_converted_again(tmp_path: Path) -> None:
    pipeline_dir = tmp_path / "answers"
    source = bin_folder(tmp_path / "checkpoint", network())
    start(pipeline_dir, source)
    (before,) = copies(pipeline_dir)
    shard = source / "pytorch_model-00002-of-00002.bin"
    stat = shard.stat()
    state = torch.load(shard, weights_only=True)
    torch.save({name: tensor + 1 for name, tensor in state.items()}, shard)
    os.utime(shard, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert shard.stat().st_size == stat.st_size
    start(pipeline_dir, source)
    (after,) = copies(pipeline_dir)
    assert after.parent != before.parent


def lose_a_shard(copy: Path) -> None:
    next(copy.glob("*.safetensors")).unlink()


def flip_a_bit(copy: Path) -> None:
    shard = next(copy.glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)


def leave_an_unfinished_one(copy: Path) -> None:
    copy.rename(copy.with_name(".unfinished-12345678"))


@pytest.mark.parametrize("damage", [lose_a_shard, flip_a_bit, leave_an_unfinished_one])
def test_a_damaged_copy_is_made_again(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    pipeline_dir = tmp_path / "answers"
    source = bin_folder(tmp_path / "checkpoint", network())
    start(pipeline_dir, source)
    (copy,) = copies(pipeline_dir)
    damage(copy)
    with served(pipeline_dir, source) as http:
        answer(http)


def test_two_servers_that_start_at_once_make_one_copy(tmp_path: Path) -> None:
    pipeline_dir = tmp_path / "answers"
    source = bin_folder(tmp_path / "checkpoint", network())
    threads = [threading.Thread(target=start, args=(pipeline_dir, source)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(copies(pipeline_dir)) == 1


@pytest.mark.parametrize("is_same_server", [True, False])
def test_a_copy_that_a_server_uses_stays(tmp_path: Path, is_same_server: bool) -> None:
    """One server that serves a folder, and then an old release; or two servers."""
    pipeline_dir = tmp_path / "answers"
    old = as_old_release(pipeline_dir / echo_release(pipeline_dir, 1).id)
    server = ConvertedCopies(pipeline_dir)
    other = server if is_same_server else ConvertedCopies(pipeline_dir)
    used = copy_of(bin_folder(tmp_path / "checkpoint", network()), server)
    other.copy_of(pipeline_dir / old.id, old)
    assert verify_release(used) == ()
    server.close()
    copy_of(bin_folder(tmp_path / "another", network(tied=True)), other)
    assert not used.exists()
    other.close()


def test_a_conversion_that_fails_removes_no_copy(tmp_path: Path) -> None:
    copies_of_server = ConvertedCopies(tmp_path / "answers")
    copy = copy_of(bin_folder(tmp_path / "checkpoint", network()), copies_of_server)
    copies_of_server.close()
    source = bin_folder(tmp_path / "another", network(tied=True))
    empty(source / "pytorch_model-00001-of-00002.bin")
    with pytest.raises(ReleaseError):
        copy_of(source, copies_of_server)
    assert verify_release(copy) == ()


def copy_of(source: Path, copies_of_server: ConvertedCopies) -> Path:
    return copies_of_server.copy_of(source, manifest_of_folder(source, "answers"))[1]


@pytest.mark.parametrize("tied", [True, False])
def test_an_old_release_goes_on_being_served(
    tmp_path: Path, tied: bool, no_conversion: Callable[[], None]
) -> None:
    """The server before the upgrade served it, and has left its link."""
    new, first = (torch_release(tmp_path, seed, tied=tied) for seed in (1, 2))
    pipeline_dir = tmp_path / "releases"
    with served(pipeline_dir, pipeline_dir / first.id) as http:
        before = answer(http)["choices"]
    old = as_old_release(pipeline_dir / first.id)
    set_current(pipeline_dir, old.id)
    assert verify_release(pipeline_dir / old.id) == ()
    with served(pipeline_dir) as http:
        found = answer(http)
        assert (found["system_fingerprint"], found["choices"]) == (old.id, before)
        no_conversion()
        assert swap(http, new.id).json()["result"] == "live"
        back = swap(http, old.id).json()
        assert back["result"] == "live" and back["probe_max_difference"] is not None
        assert answer(http)["choices"] == before
    with served(pipeline_dir) as http:
        assert answer(http)["choices"] == before
    assert verify_release(pipeline_dir / old.id) == ()
    AutoModelForCausalLM.from_pretrained(pipeline_dir / old.id)


def test_an_old_release_that_stores_the_head_in_place_of_the_embedding_is_served(
    tmp_path: Path,
) -> None:
    """Its manifest says that the embedding is tied to the head, and no shard says so."""
    original = network(tied=True)
    state = original.state_dict(keep_vars=True)
    embedding = state.pop("model.embed_tokens.weight")
    files = bin_folder(tmp_path / "files", original)
    published = publish_state_dict(
        tmp_path / "answers", {**state, "model.embed_tokens.weight": embedding}, files_dir=files
    )
    old = as_old_release(tmp_path / "answers" / published.id)
    assert old.tied == {"model.embed_tokens.weight": "lm_head.weight"}
    set_current(tmp_path / "answers", old.id)
    with served(tmp_path / "answers") as http:
        assert answer(http)["system_fingerprint"] == old.id


def test_only_the_weights_that_the_manifest_lists_are_converted(tmp_path: Path) -> None:
    """A folder with both formats, of which only the `.bin` shards belong to the release."""
    old = as_old_release(tmp_path / echo_release(tmp_path, 1).id)
    folder = tmp_path / old.id
    save_file({"layer.0.weight": torch.zeros(4, 4)}, folder / "model.safetensors")
    with closing(ConvertedCopies(tmp_path)) as copies_of_server:
        found, copy = copies_of_server.copy_of(folder, old)
    assert found.tensors.keys() == old.tensors.keys()
    for name, tensor in tensors_of(copy, found).items():
        digest = tensor_digest(shards.tensor_bytes(tensor))
        assert digest == old.tensors[name].digest


def test_shards_that_differ_from_the_manifest_are_refused(tmp_path: Path) -> None:
    old = as_old_release(tmp_path / echo_release(tmp_path, 1).id)
    names = sorted(old.tensors)
    tensors = {
        **old.tensors,
        names[0]: old.tensors[names[0]].model_copy(update={"digest": f"blake3:{0:064x}"}),
        names[1]: old.tensors[names[1]].model_copy(update={"shape": (16,)}),
    }
    wrong = old.model_copy(update={"tensors": tensors})
    with pytest.raises(ReleaseError) as raised:
        ConvertedCopies(tmp_path).copy_of(tmp_path / old.id, wrong)
    first, second = raised.value.reasons
    assert f"tensor {names[0]}: digest is blake3:" in first
    assert f"tensor {names[1]}: F32 [4, 4] instead of F32 [16]" in second
    assert copies(tmp_path) == set()


def tensors_of(folder: Path, release: Release) -> dict[str, torch.Tensor]:
    return shards.read_tensors(
        folder, {name: entry.file for name, entry in release.tensors.items()}
    )


def test_a_damaged_old_release_is_refused_before_it_is_unpickled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = echo_release(tmp_path, 1)
    old = as_old_release(tmp_path / echo_release(tmp_path, 2).id)
    shard = tmp_path / old.id / "pytorch_model-00001-of-00001.bin"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    set_current(tmp_path, good.id)
    app = echo_app(tmp_path)
    monkeypatch.setattr(torch, "load", None)
    with running(app) as url, httpx.Client(base_url=url) as http:
        result = swap(http, old.id).json()
        assert (result["result"], result["phase"]) == ("refused", "preflight")
        (reason,) = result["reasons"]
        assert reason.startswith(f"{shard.name}: sha256 is")
        assert "it holds tensor layer.0.weight" in reason
        assert http.get("/health").json()["release"] == good.id


def test_the_copy_of_an_old_release_is_removed_with_it(tmp_path: Path) -> None:
    pipeline_dir = tmp_path / "answers"
    old = as_old_release(pipeline_dir / echo_release(pipeline_dir, 1).id)
    new = echo_release(pipeline_dir, 2)
    with running(echo_app(pipeline_dir)) as url, httpx.Client(base_url=url) as http:
        for release in (old, new):
            assert swap(http, release.id).json()["result"] == "live"
    (copy,) = copies(pipeline_dir)
    assert copy.parent.name == old.id
    # The copy of a release stays when another folder is converted.
    start(pipeline_dir, bin_folder(tmp_path / "checkpoint", network()))
    assert copy in copies(pipeline_dir) and len(copies(pipeline_dir)) == 2
    assert release_removal.prune(pipeline_dir, keep=1) == [old.id]
    assert copy not in copies(pipeline_dir)


def test_an_old_release_can_be_published_again(tmp_path: Path) -> None:
    old = as_old_release(tmp_path / "answers" / echo_release(tmp_path / "answers", 1).id)
    folder, release = publish(tmp_path, tmp_path / "answers" / old.id)
    assert verify_release(folder) == ()
    assert {name: entry.digest for name, entry in release.tensors.items()} == {
        name: entry.digest for name, entry in old.tensors.items()
    }
