"""What is trained is what is served: the same conversation, as a row and as a request, becomes the
same tokens with every chat template at hand."""

import importlib.util
import json
import os
import re
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from pipeline.retrain.base_model import CHAT_TEMPLATE, preset_config, train_tokenizer
from pipeline.retrain.errors import DataError
from pipeline.retrain.model import load_tokenizer as load_for_training
from pipeline.retrain.rows import Row
from pipeline.retrain.settings import RetrainSettings
from pipeline.retrain.tokens import TokenSequence, sequences
from serving.chat import ChatRequest, encode_chat
from serving.request_errors import RequestError
from serving.weights.release import Release
from tests.serving_fixtures import live_release
from tests.smollm2 import NAME

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
OF_A_TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}"
TOOLS_OF = "{{ tools | tojson if tools }}{% for m in messages %}" + OF_A_TURN
ENDS = "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
KINDS = {
    "chatml": CHATML,
    "preset": CHAT_TEMPLATE,
    "joined with the text": TOOLS_OF
    + "{% for c in m.tool_calls or [] %}{{ c.function.name + ' ' + c.function.arguments + ';' }}"
    + "{% endfor %}"
    + ENDS,
    "written as it is": TOOLS_OF
    + "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments }}{% endfor %}"
    + ENDS,
    "an object": TOOLS_OF
    + "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}"
    + ENDS,
    "none beside calls": TOOLS_OF.replace(
        "{{ m.content }}", "{{ m.content if m.content is not none }}"
    )
    + "{% if m.content is not none and m.tool_calls %}<empty>{% endif %}"
    + "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}"
    + ENDS,
    "a defined list is a list": "{{ tools | tojson if tools }}{% for m in messages %}"
    + OF_A_TURN
    + "{% if m.tool_calls is defined %}{{ m.tool_calls[0].function | tojson }}{% endif %}"
    + ENDS,
    "parts": "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    + "{% for part in m.content %}{{ part.text }}{% endfor %}"
    + ENDS,
    "the date": "{{ strftime_now('%d %b %Y') }}" + CHATML,
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tells it",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "where"}},
            },
        },
    }
]
CALL_OF_ROW = {"function": {"arguments": {"city": "Köln", "days": None}, "name": "weather"}}
CALL_OF_REQUEST = {
    "id": "abcdefghi",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city":"K\\u00f6ln"}'},
}
NULLS = {"tool_calls": None, "tool_call_id": None, "name": None}


def said(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


# The messages of a row, and the same messages as a client sends them. The answer is the last one.
WAYS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {
    "text": (
        [said("user", "Was kostet es?", **NULLS), said("assistant", "Sieben Taler", **NULLS)],
        [said("user", "Was kostet es?"), said("assistant", "Sieben Taler")],
    ),
    "parts": (
        [
            said("user", [{"type": "text", "text": "Was", "image": None}]),
            said("assistant", [{"type": "text", "text": "Sieben", "image": None}]),
        ],
        [said("user", "Was"), said("assistant", "Sieben")],
    ),
    "two parts": (
        [said("user", [{"text": "Was"}, {"text": "kostet es"}]), said("assistant", "Sieben")],
        [
            said("user", [{"type": "text", "text": each} for each in ("Was", "kostet es")]),
            said("assistant", "Sieben"),
        ],
    ),
    "developer": (
        [said("developer", "Be brief"), said("user", "Was"), said("assistant", "Sieben")],
        [said("developer", "Be brief"), said("user", "Was"), said("assistant", "Sieben")],
    ),
    "empty lists": (
        [said("user", "Was", tool_calls=[]), said("assistant", "Acht", tool_calls=[])] * 2,
        [said("user", "Was"), said("assistant", "Acht", tool_calls=[])] * 2,
    ),
    "metadata": (
        [said("user", "Was", id="m1", timestamp=3), said("assistant", "Acht", metadata={"a": 1})],
        [said("user", "Was"), said("assistant", "Acht")],
    ),
}
CALLS = {
    "objects": ({**CALL_OF_ROW, "id": "abcdefghi", "type": "function"}, ""),
    "JSON text": ({**CALL_OF_REQUEST, "index": 0}, None),
}
for name, (call, content) in CALLS.items():
    WAYS[name] = (
        [
            said("user", "Wetter?"),
            said("assistant", content, tool_calls=[call]),
            said("tool", "nass und kalt", tool_call_id="abcdefghi", name="weather"),
            said("assistant", "Es regnet"),
        ],
        [
            said("user", "Wetter?"),
            said("assistant", None, tool_calls=[CALL_OF_REQUEST]),
            said("tool", "nass und kalt", tool_call_id="abcdefghi", name="weather"),
            said("assistant", "Es regnet"),
        ],
    )


def trl_templates() -> Iterator[tuple[str, str]]:
    found = importlib.util.find_spec("trl")
    if found is not None and found.origin is not None:
        for path in sorted((Path(found.origin).parent / "chat_templates").glob("*.jinja")):
            yield path.stem, path.read_text()


def smollm2_template() -> dict[str, str]:
    """Empty where the tests of the real model have not fetched it."""
    cache = os.environ.get("HOTPUSH_TEST_CACHE") or Path.home() / ".cache" / "hotpush-tests"
    file = Path(cache) / NAME / "chat_template.jinja"
    return {"smollm2": file.read_text()} if file.is_file() else {}


TEMPLATES = KINDS | dict(trl_templates()) | smollm2_template()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer that has every special token of the templates."""
    folder = tmp_path_factory.mktemp("base")
    tokenizer = train_tokenizer([])
    marks = {
        mark for text in TEMPLATES.values() for mark in re.findall(r"<[|\uff5c][^<>'\"]+>", text)
    }
    ends = {"<end_of_turn>", "<end_of_utterance>", "<turn|>", "</s>"}
    tokenizer.add_special_tokens({"additional_special_tokens": sorted(marks | ends)})
    tokenizer.bos_token = "<|user|>"
    tokenizer.save_pretrained(folder)
    preset_config("preset:tiny", tokenizer).save_pretrained(folder)
    return folder


def with_template(folder: Path, target: Path, template: str) -> Path:
    target.mkdir()
    for path in folder.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    (target / "chat_template.jinja").write_text(template)
    return target


def trained(
    tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, Any]], tools: Any
) -> list[TokenSequence] | str:
    """The sequences of the answers, or why there are none."""
    row = Row(messages=tuple(messages), tools=tools, file="a.jsonl", number=0)
    try:
        return sequences([row], tokenizer, 1 << 20)
    except DataError as error:
        return str(error)


def served(folder: Path, messages: list[dict[str, Any]], tools: Any) -> tuple[int, ...]:
    live = live_release(Release.model_construct(id="r000001"), folder)
    request = ChatRequest.model_validate({"messages": messages, "tools": tools})
    return encode_chat(request, live)[0]


SHOW_NO_TOOLS = {"chatml", "preset", "parts", "the date"}
REASONS_FIRST = ("deepseek", "nemotron", "glm4moe")
"""They ask for reasoning that they do not show again, or end no answer."""


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_is_trained_is_what_is_served(name: str, folder: Path, tmp_path: Path) -> None:
    mine = with_template(folder, tmp_path / "mine", TEMPLATES[name])
    tokenizer: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(mine)
    both = set()
    for way, (of_row, of_request) in WAYS.items():
        tools = TOOLS if way in CALLS else None
        found = trained(tokenizer, of_row, tools)
        if isinstance(found, str):
            continue
        try:
            prompt = served(mine, of_request[:-1], tools)
        except RequestError as error:
            pytest.fail(f"{way} is trained, but a server refuses it: {error}")
        asked = found[-1].token_ids[: len(prompt)]
        assert tokenizer.decode(asked) == tokenizer.decode(prompt), way
        if way == "empty lists":
            learned = "".join(str(tokenizer.decode(each.learned_ids)) for each in found)
            assert (learned.count("Acht"), learned.count("Was")) == (2, 0)
        assert "{'city'" not in tokenizer.decode(prompt), "the Python form of arguments"
        both.add(way)
    if name in KINDS:
        assert both == set(WAYS) - (set(CALLS) if name in SHOW_NO_TOOLS else set())
    else:
        assert "text" in both or name.startswith(REASONS_FIRST)


def test_the_day_of_a_training_is_the_day_of_its_prompts(folder: Path, tmp_path: Path) -> None:
    mine = with_template(folder, tmp_path / "mine", KINDS["the date"])
    settings = RetrainSettings(
        pipeline="p", dataset="me/d", releases_dir=tmp_path, bases_dir=tmp_path
    )
    asked = [said("user", "Was")]

    def days() -> tuple[str, str]:
        """Of the trained and of the served prompt."""
        tokenizer, _ = load_for_training(mine, settings)
        found = trained(tokenizer, [*asked, said("assistant", "Acht")], None)
        assert not isinstance(found, str)
        return str(tokenizer.decode(found[-1].token_ids))[:11], tokenizer.decode(
            served(mine, asked, None)
        )[:11]

    today = datetime.now().strftime("%d %b %Y")
    assert days() == (today, today)
    # A release that was trained on another day says so, and a delta goes on from it.
    file = mine / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "prompt_date": "2024-07-26"}))
    assert days() == ("26 Jul 2024", "26 Jul 2024")
