"""The base model of a pipeline: a preset that this module makes, a checkpoint folder, or a model on
a hub."""

import hashlib
import os
import re
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict

from pipeline.retrain.errors import BaseModelAway, BaseModelError
from pipeline.retrain.rows import Row
from pipeline.retrain.sources import cached_login, is_away
from serving.errors import first_line
from serving.weights.atomic_file import fsync

if TYPE_CHECKING:
    from transformers import LlamaConfig, PreTrainedTokenizerFast

END, SYSTEM, USER, ASSISTANT = "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"
VOCABULARY = 4_096
CONTEXT = 1_024
HUB_ID = re.compile(r"\w[\w.-]*/[\w.-]+(@[\w./-]+)?")
SAFETENSORS = re.compile(r"model(-\d+-of-\d+)?\.safetensors")
PICKLED = re.compile(r"pytorch_model(-\d+-of-\d+)?\.bin")

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

PRESET_LENGTH, DEFAULT_LENGTH = 256, 1_024
PRESETS = {
    "preset:tiny": {
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    }
}
"""The sizes of each preset. A preset is a Llama model with random weights. Its vocabulary is
learned from the rows of the pipeline's first job."""


def longest_sequence(wanted: int | None, base_model: str, context: int | None) -> int:
    """The largest number of tokens in one training sequence. wanted: the setting
    `train.max_length`. context: the context length in the model's config, or None."""
    usual = PRESET_LENGTH if base_model in PRESETS else DEFAULT_LENGTH
    return min(wanted or usual, context or DEFAULT_LENGTH)


class Base(BaseModel):
    """`base.json` in the job's folder. It records the base model, so that every attempt of a job
    starts from the same weights."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    folder: Path
    """The folder of the base model, which `from_pretrained` can load."""
    revision: str | None = None
    """The commit of a model on a hub. None for a preset or a folder."""
    files_digest: str | None = None
    """The digest of the weights files (`files_digest`) of a folder that the settings name. None for
    a preset or a model on a hub."""

    @property
    def identity(self) -> str:
        """A text that differs for different weights."""
        return f"{self.folder} {self.files_digest}"


def files_digest(base_model: str) -> str | None:
    """A digest of the name, the size and the time of each weights file in the folder `base_model`.
    So the weights need not be read to find out that the folder now has other ones. None if
    `base_model` names no folder: a preset and a commit on a hub never change."""
    folder = Path(base_model).expanduser()
    if base_model in PRESETS or not folder.is_dir():
        return None
    files = sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")])
    stats = [(file.name, file.stat()) for file in files]
    told = [f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in stats]
    return hashlib.sha256("\n".join(told).encode()).hexdigest()


def find_base(
    base_model: str,
    bases_dir: Path,
    rows: Iterable[Row],
    *,
    pipeline: str,
    seed: int,
    endpoint: str | None = None,
    token: str | Literal[False] | None = None,
    pinned: str | None = None,
    has_weights: bool = True,
) -> Base:
    """Find the base model. If it is not on this disk yet, it is made or fetched.

    bases_dir: the folder for the base models of all pipelines. Its folder `hub` holds the models
    that were fetched from a hub, and all pipelines share them. A preset is made once for each
    pipeline, from its `rows`, and is never deleted. pinned: the commit of the base model from which
    the pipeline's releases were trained so far; if that is None, it is the revision in the model's
    id, or the newest commit of `main`. has_weights: whether the weights are needed too.

    Raises BaseModelError if there is no such model, and BaseModelAway if the hub does not answer.
    """
    if base_model in PRESETS:
        folder = bases_dir / pipeline / base_model.partition(":")[2]
        if not folder.exists():
            _publish_preset(base_model, rows, folder, seed)
        return Base(folder=folder)
    if base_model.startswith("preset:"):
        raise BaseModelError(f"no preset {base_model!r}; choose one of {', '.join(PRESETS)}")
    folder = Path(base_model).expanduser()
    if folder.is_dir():
        return Base(folder=folder, files_digest=files_digest(base_model))
    if not HUB_ID.fullmatch(base_model):
        raise BaseModelError(
            f"no base model at {base_model}: no such folder; set `base_model` to a folder with "
            "config.json, a hub id (owner/name, or owner/name@revision), or preset:tiny"
        )
    cache = bases_dir / "hub"
    repo, _, revision = base_model.partition("@")
    if pinned is not None and (folder := cached_folder(cache, repo) / pinned).is_dir():
        return Base(folder=folder, revision=pinned)
    import httpx2  # the hub's client raises its errors
    from huggingface_hub import HfApi

    # Without False, the client would send the job's HF_TOKEN.
    api = HfApi(endpoint, token or cached_login() or False)
    try:
        info = api.model_info(repo, revision=pinned or revision or None)
        files = needed_files([each.rfilename for each in info.siblings or ()])
        if not has_weights:
            files = [file for file in files if not file.endswith((".safetensors", ".bin"))]
        fetched = api.snapshot_download(
            repo, revision=info.sha, allow_patterns=files, cache_dir=cache
        )
    except (httpx2.HTTPError, OSError) as error:
        reason = first_line(error)
        raise (BaseModelAway if is_away(error) else BaseModelError)(
            f"base model {base_model!r} could not be fetched from {endpoint or 'huggingface.co'} "
            f"({reason}); check the name and the connection, or set `base_model` to a folder"
        ) from error
    return Base(folder=Path(fetched), revision=info.sha)


def cached_folder(cache: Path, repo: str) -> Path:
    """The folder that holds one folder for each fetched commit of the model."""
    return cache / f"models--{repo.replace('/', '--')}" / "snapshots"


def needed_files(files: Sequence[str]) -> list[str]:
    """The files among `files` that `from_pretrained` reads. Files in subfolders are left out, and
    so are copies of the weights in another format."""
    own = [file for file in files if "/" not in file]
    weights = [file for file in own if SAFETENSORS.fullmatch(file)]
    weights = weights or [file for file in own if PICKLED.fullmatch(file)]
    others = [file for file in own if file.endswith((".json", ".jinja", ".txt", ".model"))]
    indices = [file for file in others if file.endswith(".index.json")]
    own_index = {f"{stem}.index.json" for stem in ("model.safetensors", "pytorch_model.bin")}
    return [*weights, *(file for file in others if file not in indices or file in own_index)]


def _publish_preset(preset: str, rows: Iterable[Row], folder: Path, seed: int) -> None:
    """Make the preset in a temporary folder, and rename this folder. So `folder` is never
    incomplete."""
    import torch
    from transformers import LlamaForCausalLM

    tokenizer = train_tokenizer(rows)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(preset_config(preset, tokenizer))
    # Only one job of a pipeline runs at a time. So any temporary folder here is from a job that was
    # killed.
    for killed in folder.parent.glob(f".{folder.name}.*"):
        shutil.rmtree(killed)
    aside = folder.with_name(f".{folder.name}.{os.getpid()}")
    aside.mkdir(parents=True)
    model.save_pretrained(aside)
    tokenizer.save_pretrained(aside)
    os.replace(aside, folder)
    fsync(folder.parent)


def preset_config(preset: str, tokenizer: "PreTrainedTokenizerFast") -> "LlamaConfig":
    from transformers import LlamaConfig

    return LlamaConfig(
        **PRESETS[preset],
        # With a multiple of 64, the matrix product of the output layer is faster.
        vocab_size=-(-len(tokenizer) // 64) * 64,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def train_tokenizer(rows: Iterable[Row]) -> "PreTrainedTokenizerFast":
    """Learns a byte-level BPE tokenizer from the text of the rows. It can tokenize every string."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        min_frequency=2,
        special_tokens=[END, SYSTEM, USER, ASSISTANT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (text for row in rows for text in row.texts if isinstance(text, str))
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=END,
        additional_special_tokens=[SYSTEM, USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )
