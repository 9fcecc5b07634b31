"""With `echo`, the text of an answer begins with the prompt, and `text_offset` points into it."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import processors

from serving.completions import plan_completion
from serving.detokenizer import Delta, TokenText
from serving.engine import TokenLogprob
from serving.openai_schemas import CompletionRequest
from tests.serving_fixtures import EOS, byte_tokenizer, echo_release, live_release

A, B = byte_tokenizer().encode("ab").ids


@pytest.mark.parametrize(
    ("body", "text", "offsets"),
    [
        # The tokenizer puts an <eos> before each text; it is not part of the prompt's text.
        ({"prompt": "ab"}, "ab", [0, 0, 1]),
        ({"prompt": "a<eos>b"}, "a<eos>b", [0, 0, 1, 6]),
        ({"prompt": "<eos>b", "skip_special_tokens": False}, "<eos>b", [0, 0, 5]),
        ({"prompt": "<eos>b", "add_special_tokens": False}, "<eos>b", [0, 5]),
        ({"prompt": [EOS, A, EOS, B]}, "ab", [0, 0, 1, 1]),
        (
            {"prompt": [EOS, A, EOS, B], "skip_special_tokens": False},
            "<eos>a<eos>b",
            [0, 5, 6, 11],
        ),
        ({"prompt": [EOS, *byte_tokenizer().encode("é").ids, EOS, B]}, "éb", [0, 0, 0, 1, 1]),
    ],
)
def test_offsets_point_into_the_echo(
    tmp_path: Path, body: dict[str, Any], text: str, offsets: list[int]
) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<eos> $A", special_tokens=[("<eos>", EOS)]
    )
    release = echo_release(tmp_path, 1, tokenizer=tokenizer)
    folder = tmp_path / release.id
    live = live_release(release, folder)
    request = CompletionRequest.model_validate({**body, "echo": True, "logprobs": 0})
    plan = plan_completion(request, live)
    one = TokenLogprob(token_id=B, logprob=-1.0)
    answered = Delta(
        text="b",
        tokens=(TokenText(token_id=B, offset=0, logprob=-1.0),),
        prompt_logprobs=(one,) * (len(offsets) - 1),
    )
    choice = plan.choice(0, answered, is_whole=True)
    assert choice is not None
    assert choice["text"] == text + "b"
    assert choice["logprobs"]["text_offset"] == [*offsets, len(text)]
