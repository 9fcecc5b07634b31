"""A release's tokenizer gives the ids that `AutoTokenizer` gives, knows which tokens end an answer,
and goes live only with a network that has its tokens."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from transformers import AutoTokenizer

from serving.chat_template import normalise
from serving.errors import ReleaseError
from serving.tokenizer import load_tokenizer
from tests.serving_fixtures import EOS, byte_tokenizer

TEXTS = ("ab ab", " ab", "", "a<end>b a", "b  a")


def byte_level(*, space: bool = False) -> Tokenizer:
    alphabet = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE({**alphabet, "ab": 256, "Ġa": 257}, [("a", "b"), ("Ġ", "a")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=space)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<begin>"), AddedToken("<end>")])
    return tokenizer


def llama2() -> Tokenizer:
    vocab = {"<unk>": 0, "<begin>": 1, "<end>": 2, "▁": 3, "a": 4, "b": 5, "▁a": 6}
    tokenizer = Tokenizer(models.BPE(vocab, [("▁", "a")], unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("<begin>"), AddedToken("<end>")])
    return tokenizer


def limited() -> Tokenizer:
    """Cuts and pads each text to four tokens, as the training that wrote the file did."""
    tokenizer = byte_level()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=4, pad_id=259, pad_token="<end>")
    return tokenizer


NAMES = {"bos_token": "<begin>", "eos_token": "<end>", "unk_token": "<end>"}
CASES: dict[str, tuple[Tokenizer, dict[str, Any]]] = {
    "plain": (byte_level(), {"tokenizer_class": "PreTrainedTokenizerFast"}),
    "gpt2": (byte_level(), {"tokenizer_class": "GPT2Tokenizer"}),
    "a space as in the file": (
        byte_level(space=True),
        {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True},
    ),
    "a space": (byte_level(), {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True}),
    "no space": (byte_level(space=True), {"tokenizer_class": "GPT2Tokenizer"}),
    "a beginning": (
        byte_level(),
        {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": True},
    ),
    "no beginning": (
        byte_level(),
        {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": False},
    ),
    "an end": (
        byte_level(),
        {"tokenizer_class": "GPT2Tokenizer", "add_eos_token": True, "add_bos_token": True},
    ),
    "llama 2": (
        llama2(),
        {"tokenizer_class": "LlamaTokenizer", "legacy": False, "unk_token": "<unk>"},
    ),
    "limits": (limited(), {"tokenizer_class": "PreTrainedTokenizerFast"}),
    "limits and a beginning": (
        limited(),
        {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": True},
    ),
    "another token": (
        byte_level(),
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "added_tokens_decoder": {"260": {"content": "<more>", "special": True}},
        },
    ),
}


def store(folder: Path, tokenizer: Tokenizer, settings: dict[str, Any], **config: object) -> Path:
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"vocab_size": 300, "max_position_embeddings": 64, **config}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize("name", CASES)
def test_ids_are_those_of_auto_tokenizer(name: str, tmp_path: Path) -> None:
    tokenizer, settings = CASES[name]
    folder = store(tmp_path, tokenizer, NAMES | settings, model_type="llama")
    found, wanted = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        assert list(found.encode(text)) == wanted(text)["input_ids"], text
        ids = found.encode(text, add_special_tokens=False)
        assert list(ids) == wanted(text, add_special_tokens=False)["input_ids"], text
        assert found.decode(ids) == wanted.decode(ids, skip_special_tokens=True), text


@pytest.mark.parametrize(
    "settings",
    [
        {"bos_token": None, "eos_token": None, "unk_token": None},
        {"eos_token": "<begin>"},  # the map is stronger
        {"eos_token": "<begin>", "added_tokens_decoder": {}},  # the map does not count
        {"bos_token": None, "eos_token": "<end>", "add_bos_token": True},
    ],
)
def test_special_tokens_are_those_of_auto_tokenizer(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    told = NAMES | {"tokenizer_class": "GPT2Tokenizer", **settings}
    folder = store(tmp_path, byte_level(), told, model_type="llama")
    special = {"bos_token": {"content": "<begin>", "lstrip": False}, "eos_token": "<end>"}
    (folder / "special_tokens_map.json").write_text(json.dumps(special))
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    found, wanted = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert found.eos_token_ids == (wanted.eos_token_id,)
    messages = [{"role": "user", "content": "ab"}]
    assert found.chat_template is not None
    prompt = found.chat_template.render(normalise(messages))
    assert prompt == wanted.apply_chat_template(messages, tokenize=False)
    assert list(found.encode("ab")) == wanted("ab")["input_ids"]


def test_a_generation_config_gives_the_defaults_of_requests(tmp_path: Path) -> None:
    folder = store(tmp_path, byte_level(), {})
    written = {"temperature": 0.6, "top_k": 20, "max_new_tokens": 9, "do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps({**written, "top_p": None}))
    found = load_tokenizer(folder).sampling_defaults
    assert found == {"temperature": 0.6, "top_k": 20, "max_tokens": 9}


@pytest.mark.parametrize(
    ("field", "value"), [("temperature", -1), ("top_p", 0), ("max_new_tokens", "many")]
)
def test_defaults_that_no_request_could_ask_for_are_refused(
    field: str, value: object, tmp_path: Path
) -> None:
    folder = store(tmp_path, byte_level(), {})
    (folder / "generation_config.json").write_text(json.dumps({field: value}))
    with pytest.raises(ReleaseError, match=r"generation_config\.json: (temp|top_p|max_tokens)"):
        load_tokenizer(folder)


IM_END, BEYOND = EOS + 1, EOS + 2


@pytest.mark.parametrize(
    ("of_tokenizer", "generation", "config", "ids"),
    [
        # Conversations were trained on a base model: only the tokenizer names the new end.
        ("<|im_end|>", {"eos_token_id": EOS}, {"eos_token_id": EOS}, {IM_END, EOS}),
        ("<|im_end|>", None, {"eos_token_id": EOS}, {IM_END, EOS}),
        ({"content": "<|im_end|>"}, {"eos_token_id": [EOS, 7]}, {}, {IM_END, EOS, 7}),
        ("<|im_end|>", {"eos_token_id": IM_END}, {}, {IM_END}),
        (None, {"eos_token_id": 7}, {"eos_token_id": EOS}, {7}),
        (None, {"eos_token_id": -1}, {}, set()),
        (None, {"eos_token_id": None}, {"eos_token_id": [EOS, 7]}, {EOS, 7}),
        ("<|im_end|>", {}, {}, {IM_END}),
        ("unknown", {}, {"eos_token_id": None}, set()),
        # The network has no embedding for it.
        ("<beyond>", {"eos_token_id": [EOS, BEYOND]}, {}, {EOS}),
    ],
)
def test_the_tokenizer_and_the_configs_add_up(
    tmp_path: Path,
    of_tokenizer: object,
    generation: dict[str, Any] | None,
    config: dict[str, Any],
    ids: set[int],
) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens([AddedToken("<|im_end|>"), AddedToken("<beyond>")])
    store(tmp_path, tokenizer, {"eos_token": of_tokenizer}, vocab_size=BEYOND, **config)
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    found = load_tokenizer(tmp_path).eos_token_ids
    assert set(found) == ids and len(found) == len(ids)


NUM_TOKENS = 257
"""What the network has: as many as `byte_tokenizer`."""


def larger() -> Tokenizer:
    alphabet = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġhello", "Ġworld"]
    return Tokenizer(models.BPE({text: i for i, text in enumerate(alphabet)}, []))


def with_image() -> Tokenizer:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens([AddedToken("<image>", special=True)])
    return tokenizer


def image_first() -> Tokenizer:
    tokenizer = with_image()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<image> $A", special_tokens=[("<image>", NUM_TOKENS)]
    )
    return tokenizer


@pytest.mark.parametrize(
    ("make", "template", "named"),
    [
        (larger, None, "token 'Ġworld' has the id 257"),
        (image_first, None, "token '<image>' has the id 257"),
        (with_image, "<image>{{ messages[0].content }}", "token '<image>' has the id 257"),
        (with_image, "{{ bos_token }}{{ messages }}", "token '<image>' has the id 257"),
    ],
    ids=["vocabulary", "around each text", "in the chat template", "by its name there"],
)
def test_a_tokenizer_that_is_larger_than_the_network_is_refused(
    tmp_path: Path, make: Callable[[], Tokenizer], template: str | None, named: str
) -> None:
    settings = {"bos_token": "<image>"}
    folder = store(tmp_path, make(), settings, vocab_size=NUM_TOKENS)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(ReleaseError) as raised:
        load_tokenizer(folder)
    (reason,) = raised.value.reasons
    assert reason.startswith(f"tokenizer.json: {named}, but vocab_size in config.json is 257")
    store(tmp_path, make(), settings, vocab_size=NUM_TOKENS + 1)
    assert load_tokenizer(folder).vocab_size == NUM_TOKENS + 1


def test_an_added_token_that_no_ordinary_prompt_has_is_no_reason(tmp_path: Path) -> None:
    """As in Gemma 3 of 1B. A text that spells it out is refused when it comes."""
    folder = store(tmp_path, with_image(), {}, vocab_size=NUM_TOKENS)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert load_tokenizer(folder).encode("<image>") == (NUM_TOKENS,)


def test_a_chat_template_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    folder = store(tmp_path, byte_tokenizer(), {}, vocab_size=NUM_TOKENS)
    (folder / "chat_template.jinja").write_bytes("café".encode("latin-1"))
    with pytest.raises(ReleaseError, match=r"chat_template\.jinja: not UTF-8 text"):
        load_tokenizer(folder)
