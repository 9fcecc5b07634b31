"""The messages of a request that get into the prompt."""

from pathlib import Path
from typing import Any

import pytest

from serving.admission import LiveRelease
from serving.chat import encode_chat
from serving.chat_schemas import ChatRequest
from serving.tokenizer import load_tokenizer
from tests.serving_fixtures import echo_release

KNOWN_ROLES = (
    "{% for m in messages %}{% if m.role == 'system' %}<s>{{ m.content }}{{ m.tools }}"
    "{% elif m.role == 'user' %}<u>{{ m.content }}{% endif %}{% endfor %}"
)
PARTS = (
    "{% for m in messages %}<{{ m.role[0] }}>"
    "{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}"
)
WITH_DEVELOPERS = KNOWN_ROLES.replace("{% elif", "{% elif m.role == 'developer' %}<d>{% elif", 1)
USER = {"role": "user", "content": "Hi"}


def prompt_of(folder: Path, chat_template: str, messages: list[dict[str, Any]]) -> str:
    release = echo_release(folder, 1, chat_template=chat_template)
    tokenizer = load_tokenizer(folder / release.id)
    live = LiveRelease(
        release=release, folder=folder / release.id, tokenizer=tokenizer, live_since=0
    )
    return tokenizer.decode(encode_chat(ChatRequest(messages=messages), live))


def said(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


@pytest.mark.parametrize(
    ("template", "messages", "prompt"),
    [
        (KNOWN_ROLES, [said("developer", "In French", tools=["a"]), USER], "<s>In French<u>Hi"),
        (
            KNOWN_ROLES,
            [said("system", "Be brief"), USER, said("developer", "In French"), USER],
            "<s>Be brief\n\nIn French<u>Hi<u>Hi",
        ),
        (KNOWN_ROLES, [USER, said("developer", "In French")], "<s>In French<u>Hi"),
        (
            PARTS,
            [said("system", "Be brief"), said("developer", [{"type": "text", "text": "A"}]), USER],
            "<s>Be brief\n\nA<u>Hi",
        ),
        (WITH_DEVELOPERS, [said("developer", "In French"), USER], "<d><u>Hi"),
        # Without a developer, the messages stay as they are.
        (KNOWN_ROLES, [USER, said("system", "A"), said("system", "B")], "<u>Hi<s>A<s>B"),
    ],
)
def test_a_developer_is_the_system_for_templates_that_know_no_developers(
    tmp_path: Path, template: str, messages: list[dict[str, Any]], prompt: str
) -> None:
    assert prompt_of(tmp_path, template, messages) == prompt
