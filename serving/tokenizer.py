"""A release's tokenizer: text to token ids, and token ids back to text while they arrive."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from tokenizers import Tokenizer

from serving.chat_template import ChatTemplate
from serving.errors import ReleaseError
from serving.openai_schemas import CompletionRequest
from serving.weights import network
from serving.weights.index import INDEX_FILES, is_shard_name
from serving.weights.release import FileEntry, Release

REPLACEMENT = "\ufffd"

_CHARACTER_BYTES = 4
"""Of a character in UTF-8, at most; a token has at least one."""
_MOST_WAITING = 16
"""Tokens that wait for the end of a character."""
_PROMPT_TOKENS = 6

_OLDER_FILES = ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
"""Of tokenizers that `transformers` converts."""

_SAMPLING_FIELDS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "max_new_tokens": "max_tokens",
}
"""Fields of `generation_config.json`, and what requests call them."""


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
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)
    """What `generation_config.json` sets for requests that say nothing, by the names of requests:
    `temperature`, `top_p`, `top_k`, `min_p`, the penalties and `max_tokens`."""
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

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Tokens that no text shows, such as the one at its end."""
        added = self.tokenizer.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    def is_special(self, text: str) -> bool:
        """Whether `text` is a token that `decode` leaves out."""
        return self.tokenizer.token_to_id(text) in self.special_ids

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
    the token before it: a leading space is dropped where a text begins. So a window is decoded that
    begins one piece earlier, the first time with the prompt's last tokens, and a piece that ends in
    an unfinished character waits for the next token. It waits for few: after them, all is given out
    but the last bytes, which may still be a character's beginning.
    """

    def __init__(
        self,
        tokenizer: ReleaseTokenizer,
        prompt: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
    ) -> None:
        """`prompt` are the tokens that the sequence follows; their own text is not given out."""
        self._decode = partial(tokenizer.decode, skip_special_tokens=skip_special_tokens)
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        shown = (token_id for token_id in reversed(prompt) if token_id not in self._skipped)
        self._ids = list(islice(shown, _PROMPT_TOKENS))[::-1]
        """Tokens of the window."""
        self._given_text = self._decode(self._ids)
        """Text of the window's tokens that were given out."""
        if self._given_text.endswith(REPLACEMENT):
            # The prompt ends inside a character, and what follows would seem to change its text.
            self._ids, self._given_text = [], ""
        self._given = len(self._ids)
        """Tokens of the window whose text was given out."""

    def add(self, token_id: int) -> str:
        """Text that is certain now."""
        if token_id in self._skipped:
            return ""
        self._ids.append(token_id)
        text = self._decode(self._ids)
        if len(text) > len(self._given_text) and not text.endswith(REPLACEMENT):
            return self._give(text, len(self._ids))
        if len(self._ids) - self._given >= _MOST_WAITING:
            return self._give(*self._certain_part(text))
        return ""

    def flush(self) -> str:
        """Text of a character that stays unfinished."""
        return self._give(self._decode(self._ids), len(self._ids))

    def _certain_part(self, text: str) -> tuple[str, int]:
        """The beginning of the window that no further token changes, as text and in tokens."""
        for num_left in range(_CHARACTER_BYTES, 2 * _CHARACTER_BYTES):
            end = len(self._ids) - num_left
            head = self._decode(self._ids[:end])
            if head + self._decode(self._ids[end:]) == text:  # no character is cut there
                return head, end
        return text, len(self._ids)

    def _give(self, text: str, num_tokens: int) -> str:
        """What is new in `text`, the text of the window's first `num_tokens`."""
        piece = text[len(self._given_text) :]
        del self._ids[: self._given]
        self._given = num_tokens - self._given
        self._given_text = self._decode(self._ids[: self._given])
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
    tokenizer = _open_tokenizer(folder, settings)
    ids = tokenizer.get_vocab(with_added_tokens=True)
    context_length, vocab_size = _sizes(folder, config)
    if vocab_size is None:
        vocab_size = 1 + max(ids.values(), default=-1)
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
        sampling_defaults=_sampling_defaults(generation),
    )


def _sampling_defaults(generation: dict[str, Any]) -> dict[str, float]:
    """As vLLM reads them (`--generation-config auto`): `do_sample` is not looked at. Raises
    ReleaseError for those that no request could ask for."""
    found = {
        name: generation[field]
        for field, name in _SAMPLING_FIELDS.items()
        if generation.get(field) is not None
    }
    try:
        CompletionRequest.model_validate({"prompt": "", **found})
    except ValidationError as error:
        reasons = [
            f"generation_config.json: {fault['loc'][0]}: {fault['msg']}" for fault in error.errors()
        ]
        raise ReleaseError(*reasons) from None
    return found


def _sizes(folder: Path, config: dict[str, Any]) -> tuple[object, object]:
    """Tokens of a sequence at most, and of the vocabulary. `transformers` is asked, which takes
    seconds, only for a config that leaves them to its architecture's defaults, or has them under
    other names."""
    context = config.get("max_position_embeddings", config.get("n_positions"))
    vocab_size = config.get("vocab_size")
    if (context is None or vocab_size is None) and "model_type" in config:
        whole = network.load_config(folder)
        return network.context_length(whole), whole.get_text_config().vocab_size
    return context, vocab_size


def _open_tokenizer(folder: Path, settings: dict[str, Any]) -> Tokenizer:
    """The tokenizer that `AutoTokenizer` gives. `transformers` takes seconds to import, so it is
    asked only where tokenizer.json does not say everything."""
    path = folder / "tokenizer.json"
    if not path.is_file() and not any((folder / name).is_file() for name in _OLDER_FILES):
        raise ReleaseError(f"tokenizer.json: missing, and none of {', '.join(_OLDER_FILES)}")
    # `tokenizers` and `transformers` raise bare Exceptions, among others, for files they dislike.
    try:
        if path.is_file():
            tokenizer = Tokenizer.from_file(str(path))
            if _is_all_said(tokenizer, settings):
                return tokenizer
        from transformers import AutoTokenizer

        found: Tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True
        ).backend_tokenizer
        return found
    except Exception as error:
        raise ReleaseError(f"{path.name}: cannot be read: {error}") from error


def _is_all_said(tokenizer: Tokenizer, settings: dict[str, Any]) -> bool:
    """Whether tokenizer_config.json asks for nothing that tokenizer.json does not do."""
    kind = str(settings.get("tokenizer_class"))
    parts = list(_parts(tokenizer))
    wanted = settings.get("add_prefix_space", False if kind.startswith("GPT2") else None)
    if any(wanted not in (None, adds) for adds in _prefix_spaces(parts)):
        return False
    # Where a space is put in front of texts, tokenizers of Llama do it in another way than their
    # files say (`legacy`).
    if "Llama" in kind and any(part["type"] == "Prepend" for part in parts):
        return False
    around = tokenizer.encode("").ids
    for token, is_wanted, ids in (
        ("bos_token", settings.get("add_bos_token"), around[:1]),
        ("eos_token", settings.get("add_eos_token"), around[-1:]),
    ):
        name = _token_name(settings.get(token))
        if name is not None and is_wanted not in (None, ids == [tokenizer.token_to_id(name)]):
            return False
    added = settings.get("added_tokens_decoder")
    return not isinstance(added, dict) or all(
        tokenizer.id_to_token(int(token_id)) == _token_name(token)
        for token_id, token in added.items()
    )


def _parts(tokenizer: Tokenizer) -> Iterator[dict[str, Any]]:
    """The settings of what normalises a text and splits it into words."""
    for whole in (tokenizer.normalizer, tokenizer.pre_tokenizer):
        if whole is not None:
            part = json.loads(whole.__getstate__())
            yield from part.get("normalizers") or part.get("pretokenizers") or [part]


def _prefix_spaces(parts: list[dict[str, Any]]) -> Iterator[bool]:
    """Whether each of `parts` that could puts a space in front of texts."""
    for part in parts:
        if part["type"] == "ByteLevel":
            yield part["add_prefix_space"]
        elif part["type"] == "Metaspace":
            yield part["prepend_scheme"] != "never"
        elif part["type"] == "Prepend":
            yield True


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
    with_tools = None
    if isinstance(source, list):
        named = {each.get("name"): each.get("template") for each in source}
        source, with_tools = named.get("default"), named.get("tool_use")
    if not isinstance(source, str):
        return None
    special = {
        key: name
        for key in settings
        if key.endswith("_token") and (name := _token_name(settings[key])) is not None
    }
    return ChatTemplate(source, special, with_tools)


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
