"""Templates give the prompts that `transformers` gives with them, and run in a sandbox. Ways to
write the same conversation have one form, and what no model can be shown is refused."""

import threading
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from serving import chat_template
from serving.chat_template import (
    ChatTemplate,
    ChatTemplateError,
    ConversationError,
    TooSlow,
    normalise,
)
from serving.errors import ReleaseError
from serving.tokenizer import load_tokenizer
from tests.serving_fixtures import echo_release

MESSAGES = [
    {"role": "system", "content": "Be brief. "},
    {"role": "user", "content": "Was heißt <b>?"},
    {"role": "assistant", "content": "It stands for "},
]
TOOLS = [{"type": "function", "function": {"name": "größe", "parameters": {"b": 1, "a": 2}}}]
TALK = normalise(MESSAGES)
PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
TEMPLATES = {
    "plain": PLAIN,
    "generation": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content }}{{ eos_token }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    ),
    "trimmed generation": (
        "{% for m in messages %}\n  {%- generation -%}\n{{ m.content }}\n{%- endgeneration %}\n"
        "{% endfor %}"
    ),
    "loop controls": (
        "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}"
        "{{ m.content | trim }}{% if loop.index == 2 %}{% break %}{% endif %}{% endfor %}"
    ),
    "json": (
        "{{ tools | tojson }}{{ tools | tojson(indent=2) }}"
        "{{ tools | tojson(ensure_ascii=True, separators=(',', ':'), sort_keys=True) }}"
    ),
    "variables": (
        "{% if enable_thinking is false %}no{% endif %}"
        "{% if tools is none %}none{% endif %}{{ strftime_now('%Y') }}"
    ),
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("adds", [False, True])
def test_a_prompt_is_the_one_that_transformers_renders(name: str, adds: bool) -> None:
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    given: dict[str, Any] = {
        "tools": TOOLS if name == "json" else None,
        "add_generation_prompt": adds,
        "enable_thinking": False,
    }
    (wanted,), _ = render_jinja_template(
        [MESSAGES], chat_template=TEMPLATES[name], **given, **special
    )
    conversation = normalise(MESSAGES, given.pop("tools"))
    assert ChatTemplate(TEMPLATES[name], special).render(conversation, **given) == wanted


PARTS = [
    {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
    {
        "role": "assistant",
        "content": [{"type": "text", "text": "It "}, {"type": "text", "text": "stands"}],
    },
]
LOOP = (
    "{% for m in messages %}[{{ m.role }}]{% for part in m.content %}{{ part.text }}{% endfor %}"
    "<end>{% endfor %}"
)


MACRO = (
    "{% macro show(name, parts) %}{% for part in parts %}{{ part.text }}{% endfor %}{% endmacro %}"
)


def test_parts_are_rendered_as_transformers_does() -> None:
    (wanted,), _ = render_jinja_template([PARTS], chat_template=LOOP)
    found = ChatTemplate(LOOP, {}).render(normalise(PARTS), add_generation_prompt=False)
    assert found == wanted


@pytest.mark.parametrize(
    ("source", "takes_parts"),
    [
        (PLAIN, False),
        (LOOP, True),
        (LOOP.replace("m.content", "m['content'] | reverse"), True),
        ("{{ messages[0].content[0]['text'] }}{{ bos_token + 'x' }}", True),
        ("{% for call in messages[0].tool_calls %}{{ call.content }}{% endfor %}", False),
        ("{{ messages[0].content | tojson }}", False),
        ("{{ messages[0].content + 'x' }}", False),
        (MACRO + "{{ show('x', messages[0].content) }}", True),
        (MACRO + "{{ show(parts=messages[0]['content'] | default([])) }}", True),
        (MACRO + "{{ show(messages[0].content, messages[0].tool_calls or []) }}", False),
    ],
)
def test_a_template_that_shows_the_text_of_parts_gets_parts(source: str, takes_parts: bool) -> None:
    kind = "{{ ' list' if messages[0].content is not string else ' text' }}"
    conversation = normalise([{"role": "user", "content": "Hi"}])
    prompt = ChatTemplate(source + kind, {"bos_token": "<s>"}).render(conversation)
    assert prompt.endswith(" list" if takes_parts else " text")


def test_the_result_of_a_tool_is_a_text_for_a_template_of_parts_too() -> None:
    shown = "{{ m.content if m.content is string else m.content[0].text }}"
    both = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    conversation = normalise([{"role": role, "content": both} for role in ("user", "tool")])
    template = ChatTemplate(f"{{% for m in messages %}}{shown};{{% endfor %}}", {})
    assert template.render(conversation) == "a;a\nb;"


@pytest.mark.parametrize(
    ("source", "content"),
    [
        ("{{ messages[0].content is none }}", "True"),
        ("{{ messages[0]['content'] is not none }}", "False"),
        ("{{ messages[0].content is string }}", "True"),
        ("{{ messages[0].content + 'x' }}", "x"),
    ],
)
def test_no_content_is_none_only_for_a_template_that_asks(source: str, content: str) -> None:
    call = {"function": {"name": "f", "arguments": "{}"}}
    assert (
        ChatTemplate(source, {}).render(normalise([{"role": "assistant", "tool_calls": [call]}]))
        == content
    )


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("{{ arguments | tojson }}", '{"a": "ü"}'),
        ("{{ arguments }}", '{"a": "ü"}'),
        ("{{ 'x' + arguments + 'y' }}", 'x{"a": "ü"}y'),
        ("{{ 'x' ~ arguments }}", 'x{"a": "ü"}'),
        ("{{ '%s' | format(arguments) }}", '{"a": "ü"}'),
        ("{{ arguments | trim }}", '{"a": "ü"}'),
        ("{% for k, v in arguments.items() %}{{ k }}{{ v }}{% endfor %}", "aü"),
        ("{{ arguments is mapping }}{{ arguments is string }}", "TrueFalse"),
    ],
)
def test_arguments_are_an_object_and_its_text(source: str, shown: str) -> None:
    call = {"function": {"name": "f", "arguments": '{"a":"\\u00fc"}'}}
    source = "{% set arguments = messages[0].tool_calls[0].function.arguments %}" + source
    conversation = normalise([{"role": "assistant", "tool_calls": [call]}])
    assert ChatTemplate(source, {}).render(conversation) == shown


KNOWN_ROLES = (
    "{% for m in messages %}{% if m.role == 'system' %}<s>{{ m.content }}{{ m.tools }}"
    "{% elif m.role == 'user' %}<u>{{ m.content }}{% endif %}{% endfor %}"
)
USER = {"role": "user", "content": "Hi"}
BRIEF = {"role": "system", "content": "Be brief"}
DEVELOPER = {"role": "developer", "content": "In French", "tools": ["a"]}


@pytest.mark.parametrize(
    ("template", "messages", "prompt"),
    [
        (KNOWN_ROLES, [DEVELOPER, USER], "<s>In French<u>Hi"),
        (KNOWN_ROLES, [BRIEF, USER, DEVELOPER, USER], "<s>Be brief\n\nIn French<u>Hi<u>Hi"),
        (LOOP, [BRIEF, DEVELOPER], "[system]Be brief\n\nIn French<end>"),
        (KNOWN_ROLES + "{# 'developer' #}", [DEVELOPER, USER], "<u>Hi"),
        # Without a developer, the messages stay as they are.
        (KNOWN_ROLES, [USER, BRIEF, BRIEF], "<u>Hi<s>Be brief<s>Be brief"),
    ],
)
def test_a_developer_is_the_system_for_templates_that_know_no_developers(
    template: str, messages: list[dict[str, Any]], prompt: str
) -> None:
    assert ChatTemplate(template, {}).render(normalise(messages)) == prompt


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),  # it runs in a sandbox
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
        ("{{ extra | indent }}", "splitlines"),  # an AttributeError
        ("{{ messages | sum }}", "unsupported operand"),  # a TypeError
        ("{{ messages[0].content.format() }}{{ 'a'.encode('ascii').decode('utf-9') }}", "utf-9"),
    ],
)
def test_any_error_of_a_template_is_a_refusal(source: str, reason: str) -> None:
    with pytest.raises(ChatTemplateError, match=reason):
        ChatTemplate(source, {}).render(TALK, extra=[1])


@pytest.mark.parametrize(
    "source",
    [
        "{% if %}",
        "{% generation %}without an end",
        "".join(f"{{% for m{n} in messages %}}" for n in range(40)) + "{% endfor %}" * 40,
    ],
)
def test_a_text_that_is_no_template_is_refused(source: str) -> None:
    with pytest.raises(ReleaseError, match="chat_template"):
        ChatTemplate(source, {})


FOREVER = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_RENDER_SECONDS", 0.05)


@pytest.mark.timeout(30)
def test_a_rendering_without_end_is_ended(brief: None) -> None:
    threads = set(threading.enumerate())
    with pytest.raises(TooSlow, match=r"0\.05 seconds"):
        ChatTemplate("{% if messages | length > 1 %}" + FOREVER + "{% endif %}", {}).render(TALK)
    for thread in set(threading.enumerate()) - threads:
        thread.join()


@pytest.mark.timeout(30)
def test_a_release_whose_template_never_ends_is_refused(tmp_path: Path, brief: None) -> None:
    release = echo_release(tmp_path, 1, chat_template=FOREVER)
    with pytest.raises(ReleaseError, match=r"chat_template: .* one short message"):
        load_tokenizer(tmp_path / release.id)


ASKED = {"role": "user", "content": "Weather?"}
FUNCTION = {"name": "weather", "arguments": '{"city": "Röm", "days": [1, 2]}'}
CALL = {"id": "c1", "type": "function", "function": FUNCTION}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
SCHEMA = {"name": "weather", "description": "d", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": SCHEMA}


def calling(**changes: Any) -> dict[str, Any]:
    return {**CALLING, **changes}


def called(**changes: Any) -> dict[str, Any]:
    return calling(tool_calls=[{**CALL, "function": {**FUNCTION, **changes}}])


@pytest.mark.parametrize(
    ("written", "form"),
    [
        (ASKED, ASKED),
        ({**ASKED, "id": "m1", "timestamp": 7, "metadata": {"a": 1}}, ASKED),
        ({**ASKED, "name": None, "tool_calls": None, "reasoning_content": ""}, ASKED),
        ({**ASKED, "tool_calls": []}, ASKED),
        ({**ASKED, "content": [{"type": "text", "text": "Weather?", "image": None}]}, ASKED),
        ({**ASKED, "content": [{"type": "input_text", "text": "Weather?"}]}, ASKED),
        ({**ASKED, "content": ["Weather?"]}, ASKED),
        ({**ASKED, "content": []}, {**ASKED, "content": ""}),
        ({"role": "assistant"}, {"role": "assistant", "content": ""}),
        (
            {**ASKED, "content": ["a", {"text": "b"}]},
            {**ASKED, "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        ),
        (CALLING, CALLING),
        (calling(content=""), CALLING),
        (calling(content=[]), CALLING),
        (called(arguments='{"city":"R\\u00f6m","days":[1,2]}'), CALLING),
        (called(arguments={"city": "Röm", "days": [1, 2]}), CALLING),
        (called(arguments={"city": "Röm", "days": [1, 2], "unit": None}), CALLING),
        (called(arguments='{"unit":null}'), called(arguments='{"unit": null}')),
        (called(arguments=""), called(arguments="{}")),
        (called(arguments=None), called(arguments="{}")),
        (calling(tool_calls=[{"id": "c1", **FUNCTION}]), CALLING),
        (
            {"role": "assistant", "content": None, "function_call": FUNCTION},
            calling(tool_calls=[{"type": "function", "function": FUNCTION}]),
        ),
        (
            {"role": "function", "name": "weather", "content": "21"},
            {"role": "tool", "name": "weather", "content": "21"},
        ),
        (
            {"role": "assistant", "content": "b", "reasoning_content": "so"},
            {"role": "assistant", "content": "b", "reasoning_content": "so"},
        ),
    ],
)
def test_a_message_has_one_form(written: dict[str, Any], form: dict[str, Any]) -> None:
    assert normalise([written]).messages == (form,)
    assert normalise([form]).messages == (form,)


@pytest.mark.parametrize(
    "written",
    [
        [TOOL],
        (TOOL,),
        [SCHEMA],
        [{"type": "function", **SCHEMA}],  # the API of responses
        [{"function": {**SCHEMA, "strict": None}}],
        '[{"description": "d", "parameters": {"type": "object"}, "name": "weather"}]',
    ],
)
def test_a_tool_has_one_form_with_its_fields_in_order(written: Any) -> None:
    (tool,) = normalise([ASKED], written).tools
    assert str(tool) == str(TOOL)


@pytest.mark.parametrize("nothing", [None, [], "", "[]", "null"])
def test_nothing_is_no_tools(nothing: Any) -> None:
    assert normalise([ASKED], nothing).tools == ()


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"content": "a"}, "message 2 has no `role`"),
        ({**ASKED, "content": {"a": 1}}, r"message 2 \(user\): `content` is {'a': 1}, not text"),
        ({**ASKED, "content": 7}, "`content` is 7"),
        ({**ASKED, "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "'image_url'"),
        ({**ASKED, "content": [{"type": "text"}]}, "only text is supported"),
        (called(arguments='{"city": "Rom'), "`arguments` is text that is not JSON"),
        (called(arguments="[1]"), r"the arguments of 'weather' are \[1\], not an object"),
        (called(arguments='{"a": NaN}'), "`arguments` is text that is not JSON"),
        (calling(tool_calls={"a": 1}), "`tool_calls` is not a list of objects"),
        (calling(tool_calls=[{"type": "custom", "custom": {}}]), "names no function"),
        ("text", "`messages` is not a list of objects"),
    ],
)
def test_what_no_model_can_be_shown_is_named(message: Any, reason: str) -> None:
    with pytest.raises(ConversationError, match=reason):
        normalise([ASKED, message])
    with pytest.raises(ConversationError, match="names no function"):
        normalise([ASKED], [{"type": "retrieval"}])
