"""The fields that OpenAI's or vLLM's servers know and this server does not support.

A client may send such a field with a value that changes nothing, because many clients send default
values. Any other value is an error, because an answer that ignores the field would be wrong.
"""

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel


def _accept_only(*neutral: object) -> AfterValidator:
    """A validator that accepts only None and the values in `neutral`."""

    def check(value: object) -> object:
        if value is not None and value not in neutral:
            raise ValueError("not supported here; leave it out")
        return value

    return AfterValidator(check)


class Unsupported(BaseModel):
    """The fields that no route supports, each with the values that change nothing."""

    bad_words: Annotated[Any, _accept_only([])] = None
    cache_salt: Annotated[Any, _accept_only()] = None
    ec_transfer_params: Annotated[Any, _accept_only({})] = None
    kv_transfer_params: Annotated[Any, _accept_only({})] = None
    logits_processors: Annotated[Any, _accept_only([])] = None
    logprob_token_ids: Annotated[Any, _accept_only([])] = None
    priority: Annotated[Any, _accept_only(0)] = None
    prompt_embeds: Annotated[Any, _accept_only([])] = None
    prompt_logprobs: Annotated[Any, _accept_only()] = None
    repetition_detection: Annotated[Any, _accept_only()] = None
    return_prompt_text: Annotated[Any, _accept_only(False)] = None
    return_token_ids: Annotated[Any, _accept_only(False)] = None
    return_token_offsets: Annotated[Any, _accept_only(False)] = None
    return_tokens_as_token_ids: Annotated[Any, _accept_only(False)] = None
    spaces_between_special_tokens: Annotated[Any, _accept_only(True)] = None
    thinking_token_budget: Annotated[Any, _accept_only()] = None
    truncate_prompt_tokens: Annotated[Any, _accept_only()] = None
    use_beam_search: Annotated[Any, _accept_only(False)] = None
    vllm_xargs: Annotated[Any, _accept_only({})] = None
    watermarking: Annotated[Any, _accept_only(False)] = None


class UnsupportedChat(Unsupported):
    """More fields that are not supported: the fields of requests with messages."""

    audio: Annotated[Any, _accept_only()] = None
    chat_template: Annotated[Any, _accept_only()] = None
    function_call: Annotated[Any, _accept_only("none")] = None
    functions: Annotated[Any, _accept_only([])] = None
    media_io_kwargs: Annotated[Any, _accept_only({})] = None
    mm_processor_kwargs: Annotated[Any, _accept_only({})] = None
    modalities: Annotated[Any, _accept_only([], ["text"])] = None
    verbosity: Annotated[Any, _accept_only("medium")] = None
    web_search_options: Annotated[Any, _accept_only()] = None
