"""The tokenizer of a release: turns text into token ids, and token ids into text."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from tokenizers import Tokenizer

from serving.chat_template import PROMPT_DATE, ChatTemplate
from serving.errors import ReleaseError
from serving.openai_schemas import SAMPLING_FIELDS, CompletionRequest
from serving.weights import network
from serving.weights.release import faults_in, read_json

REPLACEMENT = "\ufffd"
_SPACES = ("\u0120", "\u2581", " ")
"""How tokenizers write a space: byte-level ones, those of SentencePiece, and others."""

_OLDER_FILES = ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
"""The files of older tokenizers, which `transformers` converts."""


@dataclass(frozen=True, kw_only=True)
class ReleaseTokenizer:
    """The tokenizer of a release, and what the config files of the release say about sequences."""

    tokenizer: Tokenizer
    eos_token_ids: tuple[int, ...]
    """The ids of the end-of-sequence tokens. `end_of_sequence_ids` says which files name them."""
    context_length: int
    """The largest number of tokens in a sequence, counting the prompt and the new tokens."""
    vocab_size: int
    """The size of the network's vocabulary: the network has embeddings for all smaller token ids.
    """
    max_token_chars: int
    """The number of characters of the longest token."""
    chat_template: ChatTemplate | None
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)
    """Field of a request → the value that `generation_config.json` sets for requests without this
    field. The fields are `SAMPLING_FIELDS` and `max_tokens`."""
    _token_texts: dict[int, str] = field(default_factory=dict, repr=False)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """The token ids of `text`."""
        # Do not use `encode`, because it keeps the GIL, so no other thread could run.
        (found,) = self.tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return tuple(found.ids)

    def added_positions(self, text: str) -> frozenset[int]:
        """The positions of the tokens that `encode` adds to the tokens of `text`. A special token
        that is spelled out in `text` is not one of them."""
        (found,) = self.tokenizer.encode_batch_fast([text])
        return frozenset(at for at, is_added in enumerate(found.special_tokens_mask) if is_added)

    def decode(
        self, token_ids: list[int] | tuple[int, ...], *, skip_special_tokens: bool = True
    ) -> str:
        """The text of `token_ids`, by default without special tokens."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """The ids of special tokens, such as the end-of-sequence token. `decode` leaves them out by
        default."""
        added = self.tokenizer.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    def token_text(self, token_id: int) -> str:
        """The text of one token for `logprobs`: the text that it adds after other tokens. Special
        tokens have a text here too."""
        text = self._token_texts.get(token_id)
        if text is None:
            # Some decoders, such as those of SentencePiece models, drop the space of a text's first
            # token. So decode the token twice, and take what the second one adds.
            alone = self.tokenizer.decode([token_id], skip_special_tokens=False)
            twice = self.tokenizer.decode([token_id, token_id], skip_special_tokens=False)
            second = twice.removeprefix(alone)
            text = second if second.endswith(alone) else alone
            self._token_texts[token_id] = text
        return text


def load_tokenizer(folder: Path) -> ReleaseTokenizer:
    """The tokenizer of a release or checkpoint folder, with the sizes and defaults that its config
    files set. Raises ReleaseError if a file is missing or wrong, or if the tokenizer has token ids
    for which the network has no embedding."""
    config = read_json(folder / network.CONFIG_FILE)
    generation = read_json(folder / "generation_config.json")
    settings = _tokenizer_settings(folder)
    tokenizer = _open_tokenizer(folder, settings)
    ids = tokenizer.get_vocab(with_added_tokens=True)
    context_length, vocab_size = _sizes(folder, config)
    chat_template = _load_chat_template(folder, settings)
    _check_ids(tokenizer, ids, vocab_size, "" if chat_template is None else chat_template.texts)
    eos_token = _token_name(settings.get("eos_token"))
    own_eos = None if eos_token is None else tokenizer.token_to_id(eos_token)
    return ReleaseTokenizer(
        tokenizer=tokenizer,
        eos_token_ids=end_of_sequence_ids(own_eos, generation, config, vocab_size),
        context_length=context_length,
        vocab_size=vocab_size,
        max_token_chars=max(map(len, ids), default=1),
        chat_template=chat_template,
        sampling_defaults=sampling_defaults(generation),
    )


def _tokenizer_settings(folder: Path) -> dict[str, Any]:
    """The content of tokenizer_config.json. Older checkpoints name their special tokens in
    special_tokens_map.json. `transformers` reads this file in the same case, and lets it override
    tokenizer_config.json."""
    settings = read_json(folder / "tokenizer_config.json")
    if "added_tokens_decoder" in settings:
        return settings
    return settings | read_json(folder / "special_tokens_map.json")


def _sizes(folder: Path, config: dict[str, Any]) -> tuple[int, int]:
    """The largest number of tokens in a sequence, and the size of the vocabulary. Raises
    ReleaseError.

    `transformers`, which takes seconds to import, is needed only if the config does not contain
    these numbers, because they are the defaults of the architecture or have other names.
    """
    context = config.get("max_position_embeddings", config.get("n_positions"))
    vocab_size = config.get("vocab_size")
    if isinstance(context, int) and isinstance(vocab_size, int):
        return context, vocab_size
    whole = network.load_config(folder)
    return network.context_length(whole), whole.get_text_config().vocab_size


def _open_tokenizer(folder: Path, settings: dict[str, Any]) -> Tokenizer:
    """The tokenizer that `AutoTokenizer` of `transformers` would make. `transformers` takes seconds
    to import, so it is used only if tokenizer.json alone would make a different tokenizer.

    The tokenizer neither cuts nor pads texts: the limits in tokenizer.json are for the training
    that wrote them. `AutoTokenizer` too applies them only if its caller asks for it."""
    path = folder / "tokenizer.json"
    if not path.is_file() and not any((folder / name).is_file() for name in _OLDER_FILES):
        raise ReleaseError(f"tokenizer.json: missing, and none of {', '.join(_OLDER_FILES)}")
    # If a file cannot be read, `tokenizers` and `transformers` raise many types of exceptions,
    # including Exception itself.
    try:
        tokenizer = Tokenizer.from_file(str(path)) if path.is_file() else None
        if tokenizer is None or not _satisfies_settings(tokenizer, settings):
            from transformers import AutoTokenizer

            # Without `trust_remote_code=False`, `transformers` would ask on the terminal whether
            # code of the release may run.
            found = AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
            tokenizer = found.backend_tokenizer
    except Exception as error:
        raise ReleaseError(f"{path.name}: cannot be read: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _satisfies_settings(tokenizer: Tokenizer, settings: dict[str, Any]) -> bool:
    """Whether `tokenizer`, which is made from tokenizer.json alone, does all that `settings`, the
    content of tokenizer_config.json, asks for."""
    tokenizer.no_padding()
    kind, shown = str(settings.get("tokenizer_class")), "a"
    if tokenizer.normalizer is not None:
        shown = tokenizer.normalizer.normalize_str(shown)
    # If a Llama tokenizer puts a space before texts, `transformers` does this in another way than
    # tokenizer.json says (its setting `legacy`).
    if "Llama" in kind and shown.startswith(_SPACES):
        return False
    if tokenizer.pre_tokenizer is not None:
        shown = tokenizer.pre_tokenizer.pre_tokenize_str(shown)[0][0]
    wanted = settings.get("add_prefix_space", False if kind.startswith("GPT2") else None)
    if wanted not in (None, shown.startswith(_SPACES)):
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


def _check_ids(tokenizer: Tokenizer, ids: dict[str, int], vocab_size: int, template: str) -> None:
    """Raise ReleaseError if ordinary prompts may contain a token for which the network has no
    embedding. `ids` maps the text of each token to its id; `template` is a text with all tokens
    that the chat template may write.

    An added token is usually no reason to refuse the release: only a text that spells it out
    contains it, and then only this text is refused. Good checkpoints have such tokens. For example,
    Gemma 3 1B has one for images. But if the tokenizer puts an added token around each text, or if
    the chat template writes it, ordinary prompts contain it.
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
            f"config.json is {vocab_size}; the ids of {len(beyond)} tokens are too large"
        )


def _load_chat_template(folder: Path, settings: dict[str, Any]) -> ChatTemplate | None:
    """The chat template of the tokenizer in `folder`. None if there is none. Raises ReleaseError.

    settings: the content of tokenizer_config.json."""
    path = folder / "chat_template.jinja"
    try:
        source = path.read_text("utf-8") if path.is_file() else settings.get("chat_template")
    except UnicodeDecodeError as error:
        raise ReleaseError(f"{path.name}: not UTF-8 text: {error}") from None
    if isinstance(source, list):
        named = [each for each in source if isinstance(each, dict)]
        source = next(
            (each.get("template") for each in named if each.get("name") == "default"), None
        )
    if not isinstance(source, str):
        return None
    special = {
        key: name
        for key in settings
        if key.endswith("_token") and (name := _token_name(settings[key])) is not None
    }
    return ChatTemplate(source, special, settings.get(PROMPT_DATE))


def end_of_sequence_ids(
    of_tokenizer: int | None, generation: dict[str, Any], config: dict[str, Any], vocab_size: int
) -> tuple[int, ...]:
    """The ids of the end-of-sequence tokens: the token that the tokenizer names, and the tokens
    that generation_config.json names. If generation_config.json names none, the tokens that
    config.json names are taken instead.

    As in vLLM, the tokenizer's token is added to the others. A base model that was trained on
    conversations often keeps its config, and then only the tokenizer names the token that ends a
    message. What is no id for which the network has an embedding, such as -1, is left out, because
    the network cannot generate such a token.
    """
    named = generation.get("eos_token_id")
    if named is None:
        named = config.get("eos_token_id")
    found = [of_tokenizer, *(named if isinstance(named, list) else [named])]
    ids = [each for each in found if isinstance(each, int) and 0 <= each < vocab_size]
    return tuple(dict.fromkeys(ids))


def sampling_defaults(generation: dict[str, Any]) -> dict[str, float]:
    """The defaults that a generation_config.json sets: field of a request → value. `do_sample` is
    ignored, as in vLLM with `--generation-config auto`. Raises ReleaseError for a value that a
    request must not have."""
    given = {name: generation.get(name) for name in SAMPLING_FIELDS}
    given["max_tokens"] = generation.get("max_new_tokens")
    found = {name: value for name, value in given.items() if value is not None}
    try:
        request = CompletionRequest.model_validate({"prompt": "", **found})
    except ValidationError as error:
        raise ReleaseError(*faults_in("generation_config.json", error)) from None
    return request.model_dump(include=set(found))


def _token_name(value: object) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
