"""The base model of a pipeline: a preset made here, a checkpoint folder, or a model of the hub."""

import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.retrain.errors import BaseModelError
from pipeline.retrain.rows import Row
from serving.weights.releases import fsync_dir

if TYPE_CHECKING:
    from transformers import LlamaConfig, PreTrainedTokenizerFast

END, SYSTEM, USER, ASSISTANT = "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"
VOCABULARY = 4_096
CONTEXT = 1_024
TOKENIZER_BYTES = 32 << 20
"""Text that the vocabulary is learned from, at most."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

PRESETS = {
    "preset:tiny": {
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    }
}
"""Widths of the Llama that each preset is; they learn the vocabulary from the first rows."""


def base_folder(
    base_model: str,
    bases_dir: Path,
    rows: Iterable[Row],
    *,
    seed: int,
    endpoint: str | None = None,
    token: str | None = None,
) -> Path:
    """The folder of the base model, ready for `from_pretrained`.

    bases_dir: the pipeline's own; a preset is made there once, from `rows`, and kept for good.
    Raises BaseModelError where there is no such model.
    """
    if base_model in PRESETS:
        folder = bases_dir / base_model.partition(":")[2]
        if not folder.exists():
            _publish_preset(base_model, rows, folder, seed)
        return folder
    if base_model.startswith("preset:"):
        raise BaseModelError(f"no preset {base_model!r}; there is {', '.join(PRESETS)}")
    folder = Path(base_model).expanduser()
    if folder.is_dir():
        _check_folder(folder)
        return folder
    if folder.is_absolute() or base_model.startswith((".", "~")) or base_model.count("/") != 1:
        raise BaseModelError(
            f"no base model at {base_model}: no such folder; set `base_model` to a folder with "
            "config.json, a hub id (owner/name), or preset:tiny"
        )
    return _fetch(base_model, bases_dir, endpoint, token)


def _check_folder(folder: Path) -> None:
    for needed in ("config.json", "tokenizer_config.json"):
        if not (folder / needed).is_file():
            raise BaseModelError(
                f"{folder} is no model checkpoint: it has no {needed}; save one there with "
                "`save_pretrained` (of the model and of the tokenizer)"
            )


def _fetch(repo: str, bases_dir: Path, endpoint: str | None, token: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        folder = snapshot_download(
            repo,
            cache_dir=bases_dir / "hub",
            endpoint=endpoint,
            token=token or _cached_login() or False,  # None would send the HF_TOKEN of the job
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise BaseModelError(
            f"base model {repo!r} could not be fetched from {endpoint or 'huggingface.co'} "
            f"({reason}); is the name right, and is there a connection? A folder works without one"
        ) from error
    _check_folder(Path(folder))
    return Path(folder)


def _cached_login() -> str | None:
    """The token that `hf auth login` stored."""
    from huggingface_hub import constants

    try:
        return Path(constants.HF_TOKEN_PATH).read_text().strip() or None
    except OSError:
        return None


def _publish_preset(preset: str, rows: Iterable[Row], folder: Path, seed: int) -> None:
    """Make the preset aside and rename it into place: whole or not there."""
    import torch
    from transformers import LlamaForCausalLM

    tokenizer = train_tokenizer(rows)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(preset_config(preset, tokenizer))
    # One by one, jobs of a pipeline come here: what is there is of one that was killed.
    for killed in folder.parent.glob(f".{folder.name}.*"):
        shutil.rmtree(killed)
    aside = folder.with_name(f".{folder.name}.{os.getpid()}")
    aside.mkdir(parents=True)
    model.save_pretrained(aside)
    tokenizer.save_pretrained(aside)
    os.replace(aside, folder)
    fsync_dir(folder.parent)


def preset_config(preset: str, tokenizer: "PreTrainedTokenizerFast") -> "LlamaConfig":
    from transformers import LlamaConfig

    return LlamaConfig(
        **PRESETS[preset],
        # A multiple of 64 keeps the output layer's matrix product on its fast path.
        vocab_size=-(-len(tokenizer) // 64) * 64,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def train_tokenizer(rows: Iterable[Row]) -> "PreTrainedTokenizerFast":
    """A byte-level BPE on the rows' text: every string has tokens, none is unknown."""
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
    tokenizer.train_from_iterator(_texts(rows), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=END,
        additional_special_tokens=[SYSTEM, USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def _texts(rows: Iterable[Row]) -> Iterable[str]:
    left = TOKENIZER_BYTES
    for row in rows:
        for text in (row.text, row.prompt, row.completion):
            if text is not None:
                left -= len(text)
                yield text
        for _, content in row.messages or ():
            left -= len(content)
            yield content
        if left < 0:
            return
