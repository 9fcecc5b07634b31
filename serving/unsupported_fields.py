"""The fields that OpenAI's or vLLM's servers know and this server does not support.

A client may send such a field with a value that changes nothing, because many clients send default
values. Any other value is an error, because an answer that ignores the field would be wrong.
"""

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel


def accept_only(*neutral: object, advice: str = "leave it out") -> AfterValidator:
    """A validator that accepts only None and the values in `neutral`."""

    def check(value: object) -> object:
        if value is not None and value not in neutral:
            raise ValueError(f"not supported here; {advice}")
        return value

    return AfterValidator(check)


_IN_STRUCTURED_OUTPUTS = accept_only(advice="write it as a field of structured_outputs")


class Unsupported(BaseModel):
    """The fields that no route supports, each with the values that change nothing."""

    bad_words: Annotated[Any, accept_only([])] = None
    cache_salt: Annotated[Any, accept_only()] = None
    ec_transfer_params: Annotated[Any, accept_only({})] = None
    guided_choice: Annotated[Any, _IN_STRUCTURED_OUTPUTS] = None
    guided_decoding_backend: Annotated[Any, accept_only()] = None
    guided_grammar: Annotated[Any, _IN_STRUCTURED_OUTPUTS] = None
    guided_json: Annotated[Any, _IN_STRUCTURED_OUTPUTS] = None
    guided_json_object: Annotated[Any, _IN_STRUCTURED_OUTPUTS] = None
    guided_regex: Annotated[Any, _IN_STRUCTURED_OUTPUTS] = None
    guided_whitespace_pattern: Annotated[Any, _IN_STRUCTURED_OUTPUTS] = None
    kv_transfer_params: Annotated[Any, accept_only({})] = None
    logits_processors: Annotated[Any, accept_only([])] = None
    logprob_token_ids: Annotated[Any, accept_only([])] = None
    priority: Annotated[Any, accept_only(0)] = None
    prompt_embeds: Annotated[Any, accept_only([])] = None
    prompt_logprobs: Annotated[Any, accept_only()] = None
    repetition_detection: Annotated[Any, accept_only()] = None
    return_prompt_text: Annotated[Any, accept_only(False)] = None
    return_token_ids: Annotated[Any, accept_only(False)] = None
    return_token_offsets: Annotated[Any, accept_only(False)] = None
    return_tokens_as_token_ids: Annotated[Any, accept_only(False)] = None
    spaces_between_special_tokens: Annotated[Any, accept_only(True)] = None
    thinking_token_budget: Annotated[Any, accept_only()] = None
    truncate_prompt_tokens: Annotated[Any, accept_only()] = None
    use_beam_search: Annotated[Any, accept_only(False)] = None
    vllm_xargs: Annotated[Any, accept_only({})] = None
    watermarking: Annotated[Any, accept_only(False)] = None


class UnsupportedChat(Unsupported):
    """More fields that are not supported: the fields of requests with messages."""

    audio: Annotated[Any, accept_only()] = None
    chat_template: Annotated[Any, accept_only()] = None
    function_call: Annotated[Any, accept_only("none")] = None
    functions: Annotated[Any, accept_only([])] = None
    media_io_kwargs: Annotated[Any, accept_only({})] = None
    mm_processor_kwargs: Annotated[Any, accept_only({})] = None
    modalities: Annotated[Any, accept_only([], ["text"])] = None
    verbosity: Annotated[Any, accept_only("medium")] = None
    web_search_options: Annotated[Any, accept_only()] = None
