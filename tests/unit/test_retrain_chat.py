"""Conversations, by the templates that models come with: what is learned is what the assistant
says."""

from dataclasses import replace
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from pipeline.retrain.base_model import train_tokenizer
from pipeline.retrain.errors import BaseModelError, DataError
from pipeline.retrain.rows import Row
from pipeline.retrain.tokens import sequences

SENTENCE = "the quick brown fox jumps over the lazy dog and the dog sleeps"
TURN_ENDS = ["<|im_end|>", "<end_of_turn>", "<|eot_id|>"]
MARKED = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}<|end|>{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
FORGETS_REASONING = (
    "{% for m in messages %}<{{ m.role }}>"
    "{{ m.content if loop.last else m.content.split('</think>')[-1] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
HAS_TOOLS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<{{ m.role }}>"
    "{{ m.content }}{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def talk(*turns: tuple[str, Any], **more: Any) -> Row:
    messages = tuple({"role": role, "content": content} for role, content in turns)
    return Row(messages=messages, file="a.jsonl", number=4, line=7, **more)


TWO_TURNS = talk(
    ("user", "the fox"), ("assistant", "jumps"), ("user", "the dog"), ("assistant", "sleeps")
)


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": "two"}}}
CALLS = Row(
    messages=(
        {"role": "user", "content": "2 + 2"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "four"},
    ),
    tools=({"type": "function", "function": {"name": "add", "parameters": {}}},),
    file="a.jsonl",
    number=4,
    line=7,
)
REASONED = Row(
    messages=(
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a", "reasoning_content": "because"},
    ),
    file="a.jsonl",
    number=4,
    line=7,
)
ANSWERS_ONLY = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
NAMES_ONLY = HAS_TOOLS.replace("call.function | tojson", "call.function.name")


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    found = train_tokenizer([Row(text=SENTENCE, file="a.txt", number=0)] * 3)
    found.add_special_tokens({"additional_special_tokens": TURN_ENDS})
    return found


def learned(tokenizer: PreTrainedTokenizerFast, row: Row, template: str | None = None) -> list[str]:
    if template is not None:
        tokenizer.chat_template = template
    return [str(tokenizer.decode(each.learned_ids)) for each in sequences([row], tokenizer, 4_096)]


def test_only_what_the_assistant_says_is_learned(tokenizer: PreTrainedTokenizerFast) -> None:
    assert learned(tokenizer, TWO_TURNS) == ["jumps<|end|>sleeps<|end|>"]


@pytest.mark.parametrize("template", [None, MARKED, FORGETS_REASONING])
@pytest.mark.parametrize(("masked", "said"), [((1,), "sleeps<|end|>"), ((3,), "jumps<|end|>")])
def test_an_answer_that_is_masked_is_context(
    tokenizer: PreTrainedTokenizerFast, template: str | None, masked: tuple[int], said: str
) -> None:
    row = replace(TWO_TURNS, masked=masked)
    assert learned(tokenizer, row, template) == [said]


def test_a_template_that_rewrites_earlier_turns_gives_each_answer_as_it_was_asked_for(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    row = talk(
        *(("user", "a"), ("assistant", "<think>hm</think>b")),
        *(("user", "c"), ("assistant", "<think>so</think>d")),
    )
    assert learned(tokenizer, row, FORGETS_REASONING) == [
        "<think>hm</think>b<|end|>",
        "<think>so</think>d<|end|>",
    ]
    second = sequences([row], tokenizer, 512)[1]
    assert str(tokenizer.decode(second.token_ids)).startswith("<user>a<|end|><assistant>b<|end|>")


def test_a_question_without_an_answer_is_no_missing_text(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    row = talk(
        *(("user", "a"), ("assistant", "<think>hm</think>b")),
        *(("user", "c"), ("assistant", "<think>so</think>d"), ("user", "the fox")),
    )
    assert len(learned(tokenizer, row, FORGETS_REASONING)) == 2


def test_without_a_template_a_question_and_its_answer_are_learned_as_they_are(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    tokenizer.chat_template = None
    pair = talk(("user", "the fox"), ("assistant", " jumps"))
    raw = Row(prompt="the fox", completion=" jumps", file="a.jsonl", number=0)
    assert sequences([pair], tokenizer, 64) == sequences([raw], tokenizer, 64)
    for more in (
        talk(("system", "s"), ("user", "q"), ("assistant", "a")),
        replace(pair, tools=({},)),
    ):
        with pytest.raises(BaseModelError, match="no chat template"):
            sequences([more], tokenizer, 64)


@pytest.mark.parametrize(
    ("template", "row", "words"),
    [
        (
            "{{ raise_exception('roles must alternate') }}",
            TWO_TURNS,
            r"refuses it \(roles must alternate\)",
        ),
        ("{{ messages | length }}", TWO_TURNS, "differently when the answer follows"),
        (
            "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}",
            talk(("system", "be brief"), ("user", "q"), ("assistant", "a")),
            r"leaves out 'be brief'",
        ),
        (
            "{% for m in messages %}{{ m.content }}{% endfor %}",
            talk(("user", "q"), ("assistant", "a"), tools=({"name": "search"},)),
            "leaves out 'search'",
        ),
        # What an earlier turn says, and the reasoning of an answer, are texts of the row too.
        (
            ANSWERS_ONLY.replace("m.content", "(m.content if m.role == 'user' else m.content[1:])"),
            TWO_TURNS,
            r"leaves out 'jumps'",
        ),
        (ANSWERS_ONLY, REASONED, "leaves out 'because'"),
        (NAMES_ONLY, CALLS, "leaves out 'two'"),
        (
            ANSWERS_ONLY.replace("<|end|>", "##"),
            TWO_TURNS,
            "ends an answer with '.*##', which is no special",
        ),
        (
            "{% for m in messages %}{{ m.content }}<|end|>{% endfor %}",
            talk(("user", "q"), ("assistant", [{"type": "image", "image": "x"}])),
            "'image': only text is supported",
        ),
    ],
)
def test_a_row_that_the_template_refuses_or_cuts_is_named(
    tokenizer: PreTrainedTokenizerFast, template: str, row: Row, words: str
) -> None:
    with pytest.raises(DataError, match=f"^a.jsonl, line 7: .*{words}"):
        learned(tokenizer, row, template)


def test_tools_and_their_calls_go_through_the_template(tokenizer: PreTrainedTokenizerFast) -> None:
    (said,) = learned(tokenizer, CALLS, HAS_TOOLS)
    assert said == '{"name": "add", "arguments": {"a": "two"}}<|end|>four<|end|>'
    (sequence,) = sequences([CALLS], tokenizer, 512)
    assert '"parameters": {}' in str(tokenizer.decode(sequence.token_ids))
    with pytest.raises(DataError, match="leaves out"):
        learned(train_tokenizer([]), CALLS)
