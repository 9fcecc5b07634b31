"""A release's tokenizer: text to token ids, and token ids back to text while they arrive."""

import json
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from serving.chat_template import ChatTemplate
from serving.errors import ReleaseError
from serving.weights.index import INDEX_FILES, is_shard_name
from serving.weights.release import FileEntry, Release

REPLACEMENT = "\ufffd"


@dataclass(frozen=True, kw_only=True)
class ReleaseTokenizer:
    tokenizer: Tokenizer
    eos_token_ids: tuple[int, ...]
    """Where generation ends, from the generation config, else the config, else the tokenizer."""
    context_length: int
    """Prompt and new tokens together, at most."""
    vocab_size: int
    """Token ids are below it."""
    chat_template: ChatTemplate | None
    _token_texts: dict[int, str] = field(default_factory=dict, repr=False)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        # `encode` keeps the interpreter's lock: no other thread would run meanwhile.
        (found,) = self.tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return tuple(found.ids)

    def decode(
        self, token_ids: list[int] | tuple[int, ...], *, skip_special_tokens: bool = True
    ) -> str:
        text: str = self.tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def is_special(self, text: str) -> bool:
        """Whether `text` is a token that `decode` leaves out."""
        token_id = self.tokenizer.token_to_id(text)
        return token_id is not None and not self.decode([token_id])

    def token_text(self, token_id: int) -> str:
        """How one token is called in `logprobs`, special ones too."""
        text = self._token_texts.get(token_id)
        if text is None:
            text = self.tokenizer.decode([token_id], skip_special_tokens=False)
            self._token_texts[token_id] = text
        return text


class Detokenizer:
    """Text of a growing sequence, in pieces that never change afterwards.

    The bytes of one character may be spread over several tokens, and a token's text may depend on
    the token before it (a leading space). So a window is decoded that begins one piece earlier, and
    a piece that ends in an unfinished character waits for the next token.
    """

    def __init__(self, tokenizer: ReleaseTokenizer, *, skip_special_tokens: bool = True) -> None:
        self._decode = partial(tokenizer.decode, skip_special_tokens=skip_special_tokens)
        self._ids: list[int] = []
        self._window = 0
        """First token of the window."""
        self._given = 0
        """Tokens whose text was given out."""
        self._given_text = ""
        """Text of the window's tokens that were given out."""

    def add(self, token_id: int) -> str:
        """Text that is certain now."""
        self._ids.append(token_id)
        text = self._decode(self._ids[self._window :])
        if text.endswith(REPLACEMENT) or len(text) <= len(self._given_text):
            return ""
        return self._give(text)

    def flush(self) -> str:
        """Text of a character that stays unfinished."""
        return self._give(self._decode(self._ids[self._window :]))

    def _give(self, text: str) -> str:
        piece = text[len(self._given_text) :]
        self._window = self._given
        self._given = len(self._ids)
        self._given_text = self._decode(self._ids[self._window :])
        return piece


def tokenizer_files(release: Release) -> dict[str, FileEntry]:
    """The files that a tokenizer may be made of: all that are neither weights nor a description.

    Of releases where these are equal, so are the tokenizers.
    """
    return {
        name: entry
        for name, entry in release.files.items()
        if not (is_shard_name(name) or name in INDEX_FILES.values() or name.endswith(".md"))
    }


def load_tokenizer(folder: Path) -> ReleaseTokenizer:
    """The tokenizer of a release or checkpoint folder. Raises ReleaseError."""
    config = _read_json(folder / "config.json")
    generation = _read_json(folder / "generation_config.json")
    settings = _read_json(folder / "tokenizer_config.json")
    tokenizer = _open_tokenizer(folder)
    # GPT-2 and its kin have an older name for it.
    context_length = config.get("max_position_embeddings", config.get("n_positions"))
    ids = tokenizer.get_vocab(with_added_tokens=True)
    vocab_size = config.get("vocab_size", 1 + max(ids.values(), default=-1))
    if not isinstance(context_length, int) or context_length < 1:
        raise ReleaseError("config.json: max_position_embeddings is not a positive number")
    if not isinstance(vocab_size, int) or vocab_size < 1:
        raise ReleaseError("config.json: vocab_size is not a positive number")
    chat_template = _chat_template(folder, settings)
    _check_ids(tokenizer, ids, vocab_size, "" if chat_template is None else chat_template.texts)
    eos = generation.get("eos_token_id", config.get("eos_token_id"))
    if eos is None and (name := _token_name(settings.get("eos_token"))) is not None:
        eos = tokenizer.token_to_id(name)
    return ReleaseTokenizer(
        tokenizer=tokenizer,
        eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (int(eos),),
        context_length=context_length,
        vocab_size=vocab_size,
        chat_template=chat_template,
    )


def _open_tokenizer(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    # `tokenizers` and `transformers` raise bare Exceptions, among others, for files they dislike.
    try:
        if path.is_file():
            return Tokenizer.from_file(str(path))
        if (folder / "tokenizer.model").is_file():
            from transformers import AutoTokenizer

            converted: Tokenizer = AutoTokenizer.from_pretrained(folder).backend_tokenizer
            return converted
    except Exception as error:
        raise ReleaseError(f"{path.name}: cannot be read: {error}") from error
    raise ReleaseError("tokenizer.json: missing, and no tokenizer.model in its place")


def _check_ids(tokenizer: Tokenizer, ids: dict[str, int], vocab_size: int, template: str) -> None:
    """Raises ReleaseError for a token that ordinary prompts have and the network has not.

    An added token is in those texts alone that spell it out, and good checkpoints have one too
    many (Gemma 3 of 1B has one for images): then such a text is refused, not the release. But what
    the tokenizer puts around each text, or the chat template names, is in ordinary prompts.
    """
    added = tokenizer.get_added_tokens_decoder().keys()
    around = tokenizer.encode("").ids
    beyond = {
        token_id: text
        for text, token_id in ids.items()
        if token_id >= vocab_size
        and (token_id not in added or token_id in around or text in template)
    }
    if beyond:
        largest = max(beyond)
        raise ReleaseError(
            f"tokenizer.json: token {beyond[largest]!r} has the id {largest}, but vocab_size in "
            f"config.json is {vocab_size}; {len(beyond)} in all do not fit"
        )


def _chat_template(folder: Path, settings: dict[str, Any]) -> ChatTemplate | None:
    path = folder / "chat_template.jinja"
    source = path.read_text() if path.is_file() else settings.get("chat_template")
    if isinstance(source, list):
        named = {each.get("name"): each.get("template") for each in source}
        source = named.get("default")
    if not isinstance(source, str):
        return None
    special = {
        key: name
        for key in ("bos_token", "eos_token", "unk_token", "pad_token")
        if (name := _token_name(settings.get(key))) is not None
    }
    return ChatTemplate(source, special)


def _token_name(value: object) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise ReleaseError(f"{path.name}: not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ReleaseError(f"{path.name}: not an object")
    return content
