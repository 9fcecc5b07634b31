"""What the files of a release or checkpoint say, read without torch: the manifest, the index (it
says which shard holds which tensor), and the headers of the shards. A release is a folder with
weights that can be served. The files in it never change. Its manifest is the file `release.json` in
this folder.

The manifest has the digests of all files and tensors. The digest of a file is a sha256, because the
Hub and `sha256sum` use sha256. The digest of a tensor is a BLAKE3
(https://github.com/BLAKE3-team/BLAKE3-specs), which takes a quarter of the time of sha256. The time
matters because a server that loads a release computes the digest of every tensor that it reads.
"""

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from blake3 import blake3
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from serving.errors import ReleaseError, first_line

RELEASE_FILE = "release.json"
INDEX_FILE = "model.safetensors.index.json"
BIN_INDEX_FILE = "pytorch_model.bin.index.json"
"""The index of a checkpoint with `.bin` shards."""
INDEX_FILES = (INDEX_FILE, BIN_INDEX_FILE)
QUESTIONS_FILE = "row_questions.json"
"""The questions of the rows (`serving/questions.py`)."""

_PIECE_BYTES = 1 << 20

RELEASE_ID = re.compile(r"r(\d{6,})-[0-9a-f]{8}")
ReleaseId = Annotated[str, Field(pattern=rf"^{RELEASE_ID.pattern}$")]

Dtype = Literal["float32", "bfloat16", "float16"]
Model = TypeVar("Model", bound=BaseModel)
PlainName = Annotated[str, StringConstraints(pattern=r"^[^./\\][^/\\]*$")]
"""The name of a file in the folder itself: another name could lead out of it."""
ShardName = Annotated[str, StringConstraints(pattern=r"^\w[\w.-]*\.(safetensors|bin)$")]
"""The name of a shard in the folder itself."""


def read_json(path: Path) -> dict[str, Any]:
    """The content of a config file; empty if the file does not exist. Raises ReleaseError."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ReleaseError(f"{path.name}: not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ReleaseError(f"{path.name}: not an object")
    return content


def faults_in(where: object, error: ValidationError) -> list[str]:
    """What pydantic has found wrong in the file `where`, one sentence for each fault."""
    return [
        ": ".join(filter(None, (str(where), ".".join(map(str, each["loc"])), each["msg"])))
        for each in error.errors()
    ]


def parse(model: type[Model], content: bytes, where: object) -> Model:
    """The model that the JSON in the file `where` describes. Raises ReleaseError with every
    fault."""
    try:
        return model.model_validate_json(content)
    except ValidationError as error:
        raise ReleaseError(*faults_in(where, error)) from None


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class FileEntry(_Record):
    size: int = Field(ge=0)
    """In bytes."""
    sha256: str


class TensorEntry(_Record):
    file: str
    """The shard that holds the tensor."""
    dtype: str
    """The dtype in the spelling of safetensors: `F32`, `BF16`, …"""
    shape: tuple[int, ...]
    digest: str = Field(pattern=r"^blake3:[0-9a-f]{64}$")
    """A digest of the tensor's bytes; it does not cover the name, dtype and shape. When a server
    changes to another release, the server's engine (the part that computes tokens) need not load a
    tensor if the engine already holds a tensor with the same digest, dtype and shape."""


class ProbeText(_Record):
    token_ids: tuple[int, ...]
    """The tokens of the text."""
    logprobs: tuple[float, ...]
    """The natural logarithm of the probability of each token, given the tokens before it. The first
    token has no logprob, so there is one logprob fewer than there are tokens."""


class Probe(_Record):
    """Texts, and the log-probabilities (logprobs) of their tokens. The job that trained the release
    computed the logprobs with the new weights. Before a server serves the release, the server
    computes the logprobs again, and compares its own values with the job's values.

    Each logprob may differ by at most the bound for the dtype in which the server computes. If
    there is no bound for this dtype, the server cannot check the release and refuses it.
    """

    dtype: str
    """The dtype in which the job computed: `float32`, `bfloat16`, …"""
    texts: tuple[ProbeText, ...]
    bounds: dict[str, float]
    """Dtype in which a server computes → the largest accepted absolute difference between a logprob
    of the server and the logprob of the job."""


class Lineage(_Record):
    """Where a release comes from. A field is None or empty if its value is not known. In a release
    that was published by hand, all fields may be None or empty."""

    parent: str | None = None
    """The id of the release that the training started from. None if the training started from the
    base model, or if nobody knows where the training started."""
    base_model: str | None = None
    """The name of the base model, as in the pipeline's settings."""
    base_revision: str | None = None
    """The commit of the base model. None if the base model did not come from a hub."""
    base_files_digest: str | None = None
    """A digest of the names, the sizes and the times of the base model's weights files. None if the
    base model was not a folder."""
    dataset: str | None = None
    """`owner/name` on a hub, or the git URL of a repository elsewhere."""
    dataset_ref: str | None = None
    dataset_revision: str | None = None
    """The commit whose rows this release was trained on."""
    dataset_base_revision: str | None = None
    """The commit of the dataset that the parent was trained on. The job trained on the rows that
    have changed since this commit. None if the job trained on all rows."""
    data_digest: str | None = None
    """A digest of all rows of the training split, except those that are held out. The digest does
    not depend on the order of the rows. If two releases have the same digest, none of these rows
    has changed between them."""
    mode: Literal["full", "delta"] | None = None
    """`full`: trained from the base model, on all rows. `delta`: trained from the parent, on the
    rows that have changed."""
    settings_digest: str | None = None
    """A digest of the training settings that affect the weights."""
    rows: tuple[Literal["messages", "prompt", "text"], ...] = ()
    """The kinds of rows that this release was trained on."""
    job_id: str | None = None
    """The id of the job that published the release."""
    delivery_ids: tuple[str, ...] = ()
    """The ids of the webhook deliveries that led to the job."""
    forced: str | None = None
    """Why the release was published although the gate (the checks of the new rows and of the new
    weights) refused it: the reason that a person gave with `--force --reason`, followed by the
    gate's reasons in parentheses. None if the gate did not refuse the release."""


class Release(_Record):
    id: ReleaseId
    pipeline: str
    created_at: str
    """UTC, ISO 8601."""
    format: Literal[2] = 2
    """The format of the manifest."""
    lineage: Lineage = Lineage()
    evaluation: dict[str, Any] | None = None
    """The job's measurements of the new weights, as JSON of `pipeline.retrain.evaluate.Evaluation`.
    None if nothing was measured."""
    files: dict[PlainName, FileEntry]
    """The files of the release, except the manifest. If the folder has another file, no check looks
    at that file."""
    tensors: dict[str, TensorEntry]
    tied: dict[str, str] = {}
    """Alias → stored name. An alias is a tensor name that uses the bytes of another tensor and has
    no bytes of its own."""
    probe: Probe | None = None
    """The logprobs that a server compares with its own before it serves the release. None if the
    release was published without a probe, as `pipeline releases publish` does. A server then
    compares no logprobs."""

    @property
    def stored_dtype(self) -> str:
        """The dtype in which most numbers of the release are stored, in the spelling of torch:
        `bfloat16` or `float16`. For any other dtype, this is `float32`."""
        counts = Counter[str]()
        for entry in self.tensors.values():
            counts[entry.dtype] += math.prod(entry.shape)
        [(most, _)] = counts.most_common(1) or [("F32", 0)]
        return {"BF16": "bfloat16", "F16": "float16"}.get(most, "float32")

    @property
    def tokenizer_files(self) -> dict[str, FileEntry]:
        """The files from which a tokenizer may be made: all files except weights, the questions
        of the rows and Markdown files. Releases in which these files are equal have equal
        tokenizers."""
        others = (*INDEX_FILES, QUESTIONS_FILE)
        return {
            name: entry
            for name, entry in self.files.items()
            if not (name in others or name.endswith((".safetensors", ".md")))
        }


class WeightsIndex(BaseModel):
    """The content of `model.safetensors.index.json` or `pytorch_model.bin.index.json`.

    Only the files that `weight_map` names are opened as shards.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    metadata: dict[str, Any] = {}
    """`total_size`: the total size of all tensors in bytes, without the headers of the shards."""
    weight_map: dict[str, ShardName] = Field(min_length=1)
    """Tensor name → file name of its shard."""


def has_bin(files: Iterable[str]) -> bool:
    """Whether a `.bin` shard is among these files. Such a shard is a pickle. No engine reads it, so
    it must be converted."""
    return any(file.endswith(".bin") for file in files)


def read_index(folder: Path, name: str = INDEX_FILE) -> WeightsIndex | None:
    """The index with this file name in a release or checkpoint folder; None if there is no such
    file. Raises ReleaseError if the index is not valid."""
    path = folder / name
    return parse(WeightsIndex, path.read_bytes(), name) if path.is_file() else None


@dataclass(frozen=True, kw_only=True, slots=True)
class HeaderEntry:
    dtype: str
    shape: tuple[int, ...]
    begin: int
    """Offset of the tensor's first byte in the file."""
    end: int
    """Offset of the first byte after the tensor."""


def read_header(path: Path) -> dict[str, HeaderEntry]:
    """Tensor name → header entry. Raises ReleaseError if the file is not a complete safetensors
    file."""
    # Imported here, because a machine that only has the hub and the receiver does not have it.
    from safetensors import SafetensorError, safe_open

    try:
        # This checks the header, and that the tensors fill the rest of the file without gaps.
        with safe_open(path, "np"), path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
    except SafetensorError as error:
        raise ReleaseError(
            f"{path.name}: truncated or not a safetensors file: {first_line(error)}"
        ) from None
    header.pop("__metadata__", None)
    entries = {}
    for name, each in header.items():
        begin, end = (8 + size + offset for offset in each["data_offsets"])
        entries[name] = HeaderEntry(
            dtype=each["dtype"], shape=tuple(each["shape"]), begin=begin, end=end
        )
    return entries


def digest_shard(path: Path) -> tuple[FileEntry, dict[str, TensorEntry]]:
    """The size and sha256 of a safetensors file, and a dict of tensor name → manifest entry. Raises
    ReleaseError."""
    header = read_header(path)
    entries = {}
    # Both hash functions release the GIL.
    with ThreadPoolExecutor(1) as pool, path.open("rb") as shard:
        whole = pool.submit(digest_file, path)
        # The file is read in pieces. If it were mapped, the process would hold all of it at the
        # end.
        piece = memoryview(bytearray(_PIECE_BYTES))
        for name, entry in header.items():
            shard.seek(entry.begin)
            digest = blake3()
            left = entry.end - entry.begin
            while left and (count := shard.readinto(piece[:left])):
                digest.update(piece[:count])
                left -= count
            entries[name] = TensorEntry(
                file=path.name, dtype=entry.dtype, shape=entry.shape, digest=spelled_digest(digest)
            )
    return whole.result(), entries


def digest_file(path: Path) -> FileEntry:
    """Size and sha256 of any file. Raises OSError."""
    with path.open("rb") as file:
        return FileEntry(
            size=path.stat().st_size, sha256=hashlib.file_digest(file, "sha256").hexdigest()
        )


def files_digest(files: Mapping[str, FileEntry]) -> str:
    """The second half of a release id: the first 8 hex digits of a sha256 that covers the names and
    sha256s of all files."""
    listed = "".join(f"{name}\0{entry.sha256}\n" for name, entry in sorted(files.items()))
    return hashlib.sha256(listed.encode()).hexdigest()[:8]


def tensor_digest(content: bytes | memoryview) -> str:
    """The digest of a tensor's bytes."""
    return spelled_digest(blake3(content))


def spelled_digest(digest: blake3) -> str:
    """The name of the algorithm, a colon and 64 hex digits."""
    return f"blake3:{digest.hexdigest()}"


def choose_dtype(asked: Dtype | Literal["auto"], device_type: str, release: Release) -> Dtype:
    """The dtype in which a server computes `release`. `asked` is the dtype of the server's
    settings.

    `auto` means the dtype in which the release is stored, if two conditions hold: the device
    computes fast in this dtype, and the release's probe has a bound for this dtype (or the release
    has no probe). Otherwise `auto` means float32.
    """
    if asked != "auto":
        return asked
    stored = release.stored_dtype
    is_bounded = release.probe is None or stored in release.probe.bounds
    if stored == "bfloat16" and is_bounded and is_fast_in_bfloat16(device_type):
        return "bfloat16"
    if stored == "float16" and is_bounded and device_type == "cuda":
        return "float16"
    return "float32"


def is_fast_in_bfloat16(device_type: str) -> bool:
    """Whether matrix products on this machine's `cpu` or `cuda` device are faster in bfloat16 than
    in float32."""
    import torch

    if device_type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    # Look for the AVX-512 instructions for bfloat16. Processors with AMX have them too. The
    # function is private, so another version of torch may lack it.
    is_supported = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return device_type == "cpu" and is_supported is not None and bool(is_supported())
