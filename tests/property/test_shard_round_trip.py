"""Any state dict comes back bit for bit from any split or a pickle, and the library agrees."""

import hashlib
import tempfile
from pathlib import Path

import torch
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from serving.weights.release import digest_shard
from serving.weights.shards import read_bin, read_tensors, write_shards

torch.set_num_threads(1)

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.uint16, torch.int16, torch.float16, torch.bfloat16,
    torch.uint32, torch.int32, torch.float32,
    torch.uint64, torch.int64, torch.float64, torch.complex64,
]  # fmt: skip
SHAPE = st.lists(st.integers(0, 5), max_size=3).map(tuple)
NAME = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12).filter(
    lambda name: name != "__metadata__"
)


@st.composite
def tensors(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for name in draw(st.lists(NAME, min_size=1, max_size=6, unique=True)):
        dtype, shape = draw(st.sampled_from(DTYPES)), draw(SHAPE)
        numel = int(torch.Size(shape).numel())
        generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
        raw = torch.randint(0, 2, (numel * dtype.itemsize,), generator=generator, dtype=torch.uint8)
        tensor = raw.view(dtype).reshape(shape) if numel else torch.empty(shape, dtype=dtype)
        if len(shape) == 2 and draw(st.booleans()):
            tensor = tensor.T
        if found and draw(st.booleans()):
            tensor = draw(st.sampled_from(list(found.values())))
        found[name] = tensor
    return found


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


@settings(max_examples=40, deadline=None)
@given(tensors(), st.integers(1, 200), st.booleans())
def test_what_is_written_is_read(
    state: dict[str, torch.Tensor], max_bytes: int, is_from_bin: bool
) -> None:
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryDirectory() as pickled:
        folder = Path(name)
        source = state
        if is_from_bin:
            torch.save(state, Path(pickled) / "pytorch_model.bin")
            source = read_bin(Path(pickled) / "pytorch_model.bin")
            assert list(source) == list(state)
        files, tensors, tied = write_shards(source, folder, max_shard_bytes=max_bytes)
        assert tensors.keys() | tied.keys() == state.keys()
        weight_map = {name: entry.file for name, entry in tensors.items()}
        assert set(weight_map.values()) == set(files) == {p.name for p in folder.iterdir()}
        back = read_tensors(folder, weight_map)
        for tensor_name, entry in tensors.items():
            original, tensor = state[tensor_name], back[tensor_name]
            assert (tensor.dtype, tensor.shape) == (original.dtype, original.shape)
            assert raw(tensor) == raw(original)
            assert entry.digest == f"blake3:{blake3(raw(original)).hexdigest()}"
        for alias, kept in tied.items():
            assert raw(state[alias]) == raw(back[kept])
        for shard, entry in files.items():
            path = folder / shard
            assert entry.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
            assert entry.size == path.stat().st_size
            mine = {n: e for n, e in tensors.items() if e.file == shard}
            assert digest_shard(path) == (entry, mine)
            assert load_file(path).keys() == mine.keys()
