"""The route `/v1/chat/completions`, which answers messages with a message.

Models have no common format for calls of tools. Each family of models uses the format of its chat
template. Three are known, under the names of vLLM's option `--tool-call-parser`
(https://docs.vllm.ai/en/stable/features/tool_calling.html):

`hermes`      `<tool_call>{"name": …, "arguments": {…}}</tool_call>`. Qwen 2.5 and 3 use this format
              too. SmolLM2 writes a list of such objects between one pair of tags.
`llama3_json` the answer is `{"name": …, "parameters": {…}}`, or the same after `<|python_tag|>`.
              Several calls are separated by semicolons.
`mistral`     `[TOOL_CALLS][{"name": …, "arguments": {…}}]`; later models write
              `[TOOL_CALLS]name[ARGS]{…}`.
"""

import json
import re
import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Request, Response
from pydantic import Field, ValidationInfo, field_validator
from pydantic_core import from_json

from serving.admission import LoadedRelease
from serving.answer import Answers, Plan
from serving.chat_template import (
    ChatTemplateError,
    Conversation,
    ConversationError,
    normalise,
    text_of,
)
from serving.completions import encode_prompt, make_generations
from serving.detokenizer import Delta, overlap
from serving.engine import Grammar
from serving.openai_schemas import (
    MAX_ITEMS,
    MAX_LOGPROBS,
    UNSUPPORTED,
    FewItems,
    Part,
    SamplingRequest,
    json_grammar,
)
from serving.request_errors import invalid

_DECODER = json.JSONDecoder()
_SEPARATORS = r"\s\[\],;"
"""Models write these characters around the objects of their calls."""


def add_chat(router: APIRouter, answers: Answers) -> None:
    @router.post("/v1/chat/completions")
    async def chat_completions(asked: ChatRequest, request: Request) -> Response:
        """Continue a conversation. A stream consists of server-sent events; each one is a chunk."""
        return answers.respond(request, asked, lambda live: plan_chat(asked, live))


class Function(Part, extra="allow"):
    name: str = Field(pattern=r"^[\w.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """The JSON schema of the arguments."""


class Tool(Part, extra="allow"):
    type: Literal["function"] = "function"
    function: Function


class ChatRequest(SamplingRequest):
    """The request body: messages, tools, and all fields of `SamplingRequest`."""

    unsupported: ClassVar[Mapping[str, object]] = {
        **UNSUPPORTED,
        **dict.fromkeys(("audio", "chat_template", "documents", "functions", "media_io_kwargs")),
        **dict.fromkeys(("mm_processor_kwargs", "web_search_options")),
        **dict.fromkeys(("continue_final_message", "echo"), False),
        "add_generation_prompt": True,
        "function_call": "none",
        "modalities": ["text"],
        "verbosity": "medium",
    }
    is_chat: ClassVar[bool] = True

    messages: list[dict[str, Any]] = Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True)
    """`normalise` checks them."""
    add_special_tokens: bool = False
    """Whether the tokenizer adds its special tokens to those that the template writes."""
    chat_template_kwargs: dict[str, Any] | None = None
    """More variables for the template. Those that the server itself sets stay what they are."""
    reasoning_effort: str | None = None
    """A variable that some templates use. It also sets the variable `enable_thinking`: to false for
    `none`, and to true for other values."""
    tools: Annotated[list[Tool], FewItems] | None = None
    tool_choice: Literal["none", "auto", "required"] | Tool | None = None
    """null means `auto`."""
    parallel_tool_calls: bool | None = None
    """false allows at most one call of a tool. null means true."""
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = False
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)

    @field_validator("tool_choice")
    @classmethod
    def _choice_is_among_the_tools(
        cls, choice: str | Tool | None, info: ValidationInfo
    ) -> str | Tool | None:
        names = [tool.function.name for tool in info.data.get("tools") or ()]
        if isinstance(choice, Tool) and choice.function.name not in names:
            raise ValueError(f"{choice.function.name!r} is none of the tools of this request")
        if choice == "required" and not names:
            raise ValueError("there are no tools to choose from")
        return choice

    @field_validator("top_logprobs")
    @classmethod
    def _top_logprobs_are_of_logprobs(cls, number: int | None, info: ValidationInfo) -> int | None:
        if number and not info.data.get("logprobs", True):
            raise ValueError("needs logprobs: true in the same request")
        return number

    @property
    def offered_tools(self) -> list[Tool]:
        """The tools that the model may call."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def forced_tools(self) -> list[Tool]:
        """The tools of which the model must call one; empty if the model may also answer with
        text."""
        choice = self.tool_choice
        if isinstance(choice, Tool):
            return [
                each for each in self.offered_tools if each.function.name == choice.function.name
            ]
        return self.offered_tools if choice == "required" else []

    @property
    def max_tokens_field(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


@dataclass(frozen=True, kw_only=True)
class ChatPlan(Plan):
    id_prefix: ClassVar[str] = "chatcmpl"
    objects: ClassVar[tuple[str, str]] = ("chat.completion", "chat.completion.chunk")

    request: ChatRequest
    readers: "list[ToolCallReader] | None"
    """One reader for each sequence; None if the model may call no tools."""

    def choice(self, index: int, part: Delta, *, is_whole: bool) -> dict[str, Any] | None:
        found = self._read(index, part)
        calls = found.calls
        if not is_whole:  # a client puts the pieces of a stream together by their index
            calls = [{"index": number, **call} for number, call in enumerate(calls)]
        said: dict[str, Any] = {"tool_calls": calls} if calls else {}
        if is_whole:
            said = {"role": "assistant", "content": found.text or (None if calls else ""), **said}
        elif index not in self.begun:
            self.begun.add(index)
            said = {"role": "assistant", "content": found.text, **said}
        elif found.text:
            said["content"] = found.text
        if not (said or part.tokens or part.finish_reason is not None):
            return None
        # If the request names the tool to call, the finish reason is "stop", as in OpenAI and vLLM.
        is_named = isinstance(self.request.tool_choice, Tool)
        is_call = part.finish_reason == "stop" and calls and not is_named
        return {
            "index": index,
            "message" if is_whole else "delta": said,
            "logprobs": self._logprobs(part) if self.request.logprobs and part.tokens else None,
            "finish_reason": "tool_calls" if is_call else part.finish_reason,
            "stop_reason": part.stop_reason,
        }

    def _read(self, index: int, part: Delta) -> "Found":
        if self.readers is None:
            return Found(part.text)
        found = self.readers[index].add(part.text, is_end=part.finish_reason is not None)
        if self.request.parallel_tool_calls is False:
            found.calls = found.calls[:1]
        return found

    def _logprobs(self, part: Delta) -> dict[str, Any]:
        return {
            "content": [
                {
                    **self._token_body(token.token_id, token.logprob),
                    "top_logprobs": [self._token_body(*other) for other in token.top],
                }
                for token in part.tokens
            ]
        }

    def _token_body(self, token_id: int, logprob: float | None) -> dict[str, Any]:
        text = self.live.tokenizer.token_text(token_id)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def plan_chat(request: ChatRequest, live: LoadedRelease) -> ChatPlan:
    """Decide what to generate for a conversation. Raises RequestError if the request does not fit
    the release."""
    prompt, rows = encode_chat(request, live)
    readers = None
    if request.offered_tools:
        assert live.tokenizer.chat_template is not None
        format = FORCED if request.forced_tools else format_of(live.tokenizer.chat_template.source)
        names = {tool.function.name for tool in request.offered_tools}
        readers = [ToolCallReader(format, names) for _ in range(request.n)]
        if live.tokenizer.tokenizer.token_to_id(format.begin) in live.tokenizer.special_ids:
            request = request.model_copy(update={"skip_special_tokens": False})
    generations = make_generations(request, live, prompt, "messages")
    if request.forced_tools:
        if request.grammar is not None:
            raise invalid("tool_choice", f"not possible together with {request.grammar.param}")
        may_be_more = request.tool_choice == "required" and request.parallel_tool_calls is not False
        grammar = tool_grammar(request.forced_tools, is_list=may_be_more)
        generations = [replace(each, grammar=grammar) for each in generations]
    return ChatPlan(
        request=request, live=live, generations=generations, readers=readers, asked_as=rows
    )


def encode_chat(
    request: ChatRequest, live: LoadedRelease
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The token ids of the prompt that the release's chat template makes of the messages; and the
    row in whose words the question is put, if any.

    Raises RequestError if the release has no chat template, if the template refuses the messages,
    or if the prompt is empty or has a token id that the network does not know.
    """
    template = live.tokenizer.chat_template
    if template is None:
        reason = f"{live.id} has no chat template; send the request to /v1/completions"
        raise invalid("messages", reason, code="no_chat_template")
    if request.offered_tools and "tools" not in template.variables:
        reason = f"the chat template of {live.id} shows none to the model; leave tools out"
        raise invalid("tools", reason, code="no_tools")
    options: dict[str, Any] = {}
    if (effort := request.reasoning_effort) is not None:
        # Some templates know only `enable_thinking`. vLLM sets it in the same way.
        options = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    options |= request.chat_template_kwargs or {}
    tools = [tool.model_dump(exclude_unset=True) for tool in request.offered_tools]
    try:
        # As in vLLM, the arguments of an earlier call that are no JSON object count as none. They
        # are not an error: all later requests of the conversation contain the same call, so they
        # would all be refused.
        conversation = normalise(request.messages, tools, must_be_readable=False)
        conversation, rows = _in_words_of_rows(conversation, live)
        text = template.render(conversation, **{**options, "add_generation_prompt": True})
    except ConversationError as error:
        raise invalid("messages", str(error)) from None
    except ChatTemplateError as error:
        raise invalid("messages", f"the chat template refuses the messages: {error}") from None
    # By default, the tokenizer adds no special tokens, because the template already contains them.
    special = request.add_special_tokens
    return encode_prompt(live, text, "messages", add_special_tokens=special), rows


def _in_words_of_rows(
    talk: Conversation, live: LoadedRelease
) -> tuple[Conversation, tuple[str, ...]]:
    """The conversation with its question in the words of the row that it means, and this row. Only
    a first question says by itself what is meant."""
    *before, last = talk.messages
    is_first = last["role"] == "user" and all(each["role"] == "system" for each in before)
    questions = live.questions.get("messages")
    if questions is None or talk.tools or not is_first:
        return talk, ()
    found = questions.meant(text_of(last["content"]))
    if found is None:
        return talk, ()
    asked = {**last, "content": found.wordings[0]}
    return replace(talk, messages=(*before, asked)), (found.row,)


@dataclass(frozen=True)
class ToolFormat:
    """How a model marks calls of tools in its text."""

    begin: str
    """The mark before calls."""
    end: str | None = None
    """The mark after calls. Text may follow this mark. None if an answer ends with its calls."""
    is_bare: bool = False
    """Whether an answer may also begin with a call that has no mark `begin` before it."""
    is_named: bool = False
    """Whether a call may also be a name and an object with the arguments, instead of an object with
    both."""

    @cached_property
    def before_object(self) -> re.Pattern[str]:
        """The text before an object."""
        name = r"(?P<name>[\w.-]{1,64})(?:\[CALL_ID\]\w{1,64})?(?:\[ARGS\])?\s*"
        return re.compile(
            rf"(?:{re.escape(self.begin)}|[{_SEPARATORS}])*"
            rf"(?:{name if self.is_named else ''})?(?=\{{)"
        )

    @cached_property
    def after_calls(self) -> re.Pattern[str]:
        """What only separates calls from the text that follows."""
        end = "" if self.end is None else rf"(?:{re.escape(self.end)}\s*)?"
        return re.compile(rf"[{_SEPARATORS}]*{end}")


HERMES = ToolFormat("<tool_call>", "</tool_call>")
LLAMA3_JSON = ToolFormat("<|python_tag|>", is_bare=True)
MISTRAL = ToolFormat("[TOOL_CALLS]", is_named=True)
FORCED = ToolFormat("[", is_bare=True)
"""The format of calls that `tool_grammar` forces: an object, or a list of objects."""


def format_of(template: str) -> ToolFormat:
    """The format that a chat template shows to the model; `hermes` if it shows none."""
    # The templates of Llama 3.2 have no mark, but contain this instruction.
    marks = (LLAMA3_JSON.begin, '{"name": function name, "parameters"')
    if any(mark in template for mark in marks):
        return LLAMA3_JSON
    return MISTRAL if MISTRAL.begin in template else HERMES


@dataclass
class Found:
    """The text and the calls that became final with one piece of text."""

    text: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    """Each as in an answer of OpenAI."""


class ToolCallReader:
    """Separates the calls in one sequence from its text.

    Text is passed on at once, up to the first place where a call may begin. What follows is passed
    on when the sequence ends. Whatever looks like a call but is not valid is text, and calls may
    follow it. The result does not depend on how the text is cut into pieces.
    """

    def __init__(self, format: ToolFormat, tools: Collection[str]) -> None:
        """`tools` are the names of the tools. An object without a mark before it is a call only if
        it names one of them, because an ordinary answer may also be a JSON object."""
        self._format = format
        self._tools = tools
        self._held = ""
        self._is_inside = False
        """Whether `_held` begins with a call or a mark."""
        self._may_be_bare = format.is_bare

    def add(self, piece: str, *, is_end: bool = False) -> Found:
        """The text and the calls that are final after `piece`. With `is_end`, `piece` is the last
        one, and nothing is held back any more."""
        self._held += piece
        if is_end:
            return self._read_all()
        begin, start = self._format.begin, self._held.lstrip()
        if self._may_be_bare and (begin.startswith(start) or start.startswith("{")):
            return Found()
        self._may_be_bare = False
        if self._is_inside:
            return Found()
        text, mark, rest = self._held.partition(begin)
        self._is_inside = bool(mark)
        if not mark:
            kept = overlap(text, begin)
            text, rest = text[: len(text) - kept], text[len(text) - kept :]
        self._held = mark + rest
        return Found(text)

    def _read_all(self) -> Found:
        found, text, begin = Found(), self._held, self._format.begin
        at = 0
        if self._may_be_bare and text.lstrip().startswith("{"):
            at = self._read_calls(0, found)
        while (start := text.find(begin, at)) >= 0:
            stop = self._read_calls(start, found)
            if stop == start:  # no call follows, so the mark is text
                stop = start + len(begin)
                found.text += text[at:stop]
            else:
                found.text += text[at:start]
            at = stop
        found.text += text[at:]
        return found

    def _read_calls(self, start: int, found: Found) -> int:
        """Add the calls that begin at `start` to `found`. Returns where the text continues."""
        place = start
        while (before := self._format.before_object.match(self._held, place)) is not None:
            try:
                _, stop = _DECODER.raw_decode(self._held, before.end())
                found.calls.append(self._call(before, self._held[before.end() : stop]))
            except (ValueError, RecursionError):
                break
            place = stop
        after = self._format.after_calls.match(self._held, place)
        return after.end() if after is not None and place > start else start

    def _call(self, before: re.Match[str], text: str) -> dict[str, Any]:
        """The call with the JSON object `text`, after `before`. Raises ValueError if it is none."""
        # A request could not contain an object that is refused here, for example one with NaN, with
        # half of a surrogate pair, or with too many levels.
        content = from_json(text, allow_inf_nan=False)
        name, given = before.groupdict().get("name"), content
        if name is None:
            name = content.get("name")
            given = content.get("arguments", content.get("parameters", {}))
        if isinstance(given, str):  # some models write the arguments as JSON text already
            given = from_json(given, allow_inf_nan=False)
        is_bare = self._may_be_bare and not self._held[: before.end()].strip()
        if not isinstance(name, str) or (is_bare and name not in self._tools):
            raise ValueError("the call names no tool")
        if not isinstance(given, dict):
            raise ValueError("the arguments are no object")
        # A number that is too large raises ValueError here.
        arguments = json.dumps(given, ensure_ascii=False, allow_nan=False)
        function = {"name": name, "arguments": arguments}
        # Mistral's templates refuse ids that have not 9 alphanumeric characters.
        return {"id": secrets.token_hex(5)[:9], "type": "function", "function": function}


def tool_grammar(tools: list[Tool], *, is_list: bool) -> Grammar:
    """A grammar that allows nothing but one call of one of `tools`, in the form
    `{"name": …, "arguments": {…}}`. With `is_list`, it allows a list of one or more such calls.

    As in vLLM, a forced call is plain JSON. The chat template may show a different format, which
    the model uses for calls that are not forced.
    """
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool.function.name},
                "arguments": {"$ref": f"#/$defs/{number}"},
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for number, tool in enumerate(tools)
    ]
    schema: dict[str, Any] = calls[0] if len(calls) == 1 else {"anyOf": calls}
    if is_list:
        schema = {"type": "array", "items": schema, "minItems": 1}
    arguments = {
        str(number): _with_root(tool.function.parameters or {"type": "object"}, f"#/$defs/{number}")
        for number, tool in enumerate(tools)
    }
    # Compact: small models can go on with whitespace until there are no tokens left.
    return json_grammar({**schema, "$defs": arguments}, "tool_choice", whitespace_flexible=False)


def _with_root(schema: dict[str, Any], root: str) -> Any:
    """`schema`, changed so that its references to its own parts are right when it stands at the
    place `root` of a larger schema."""

    def rooted(part: dict[str, Any]) -> dict[str, Any]:
        reference = part.get("$ref")
        if isinstance(reference, str) and reference.startswith("#"):
            part["$ref"] = root + reference[1:]
        return part

    return json.loads(json.dumps(schema), object_hook=rooted)
