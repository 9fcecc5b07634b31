"""Reads what the config files of a release say about sequences: which tokens end a sequence, and
the defaults of requests."""

from typing import Any

from pydantic import ValidationError

from serving.errors import ReleaseError
from serving.openai_schemas import CompletionRequest
from serving.weights.release import faults_in

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
"""Field of `generation_config.json` → the field of a request with the same meaning."""


def end_of_sequence_ids(
    of_tokenizer: int | None, generation: dict[str, Any], config: dict[str, Any], vocab_size: int
) -> tuple[int, ...]:
    """The ids of the end-of-sequence tokens: the token that the tokenizer names, and the tokens
    that generation_config.json names. If generation_config.json names none, the tokens that
    config.json names are taken instead.

    As in vLLM, the tokenizer's token is added to the others. A base model that was trained on
    conversations often keeps its config, and then only the tokenizer names the token that ends a
    message. Ids for which the network has no embedding, such as -1, are left out, because the
    network cannot generate these tokens. Raises ReleaseError for a value that is no id.
    """
    file, named = "generation_config.json", generation.get("eos_token_id")
    if named is None:
        file, named = "config.json", config.get("eos_token_id")
    found = [of_tokenizer, *(named if isinstance(named, list) else [named])]
    try:
        ids = dict.fromkeys(int(each) for each in found if each is not None)
    except (TypeError, ValueError, OverflowError):
        raise ReleaseError(
            f"{file}: eos_token_id is {named!r}, which is neither a token id nor a list of such ids"
        ) from None
    return tuple(token_id for token_id in ids if 0 <= token_id < vocab_size)


def sampling_defaults(generation: dict[str, Any]) -> dict[str, float]:
    """The defaults that a generation_config.json sets: field of a request → value. `do_sample` is
    ignored, as in vLLM with `--generation-config auto`. Raises ReleaseError for a value that a
    request must not have."""
    found = {
        name: generation[field]
        for field, name in _SAMPLING_FIELDS.items()
        if generation.get(field) is not None
    }
    try:
        CompletionRequest.model_validate({"prompt": "", **found})
    except ValidationError as error:
        raise ReleaseError(*faults_in("generation_config.json", error)) from None
    return found
