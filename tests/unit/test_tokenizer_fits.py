"""A tokenizer goes live with a network that has its tokens, and with no other."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors

from serving.errors import ReleaseError
from serving.tokenizer import load_tokenizer
from tests.serving_fixtures import byte_tokenizer

NUM_TOKENS = 257
"""What the network has: as many as `byte_tokenizer`."""


def folder_with(
    folder: Path, tokenizer: Tokenizer, *, template: str | None = None, **config: object
) -> Path:
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<image>"}')
    config = {"max_position_embeddings": 64, **config}
    (folder / "config.json").write_text(json.dumps(config))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


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
    folder = folder_with(tmp_path, make(), template=template, vocab_size=NUM_TOKENS)
    with pytest.raises(ReleaseError) as raised:
        load_tokenizer(folder)
    (reason,) = raised.value.reasons
    assert reason.startswith(f"tokenizer.json: {named}, but vocab_size in config.json is 257")
    folder_with(tmp_path, make(), template=template, vocab_size=NUM_TOKENS + 1)
    assert load_tokenizer(folder).vocab_size == NUM_TOKENS + 1


def test_an_added_token_that_no_ordinary_prompt_has_is_no_reason(tmp_path: Path) -> None:
    """As in Gemma 3 of 1B. A text that spells it out is refused when it comes."""
    folder = folder_with(tmp_path, with_image(), vocab_size=NUM_TOKENS, template="{{ messages }}")
    assert load_tokenizer(folder).encode("<image>") == (NUM_TOKENS,)


def test_a_chat_template_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, byte_tokenizer(), vocab_size=NUM_TOKENS)
    (folder / "chat_template.jinja").write_bytes("café".encode("latin-1"))
    with pytest.raises(ReleaseError, match=r"chat_template\.jinja: not UTF-8 text"):
        load_tokenizer(folder)
