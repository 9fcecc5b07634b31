"""Turns the columns of a record into the columns that a row has. It knows these columns by their
own names, by the names in the settings, and by the names that common formats use."""

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

Columns = Mapping[str, object]
KNOWN = (
    "`text`; or `prompt` and `completion`; or `messages`; or a question and its answer (`question` "
    "and `answer`; Alpaca's `instruction` and `output`); or ShareGPT's `conversations`"
)
_TALKS = ("messages", "conversations")
_QUESTIONS = ("question", "instruction", "query", "prompt", "input")
_ANSWERS = ("answer", "output", "response")
_MORE = ("input", "context")
"""Columns that belong to the question, unless they are the question itself."""
_SYSTEM = ("system", "system_prompt")
_LEARNED = ("train", "trainable")
_LEARNED_TURN = (*_LEARNED, "training", "weight", "loss", "train_detail")
"""Keys of a message of the assistant by which the author says that it is not to be learned."""
_NAMES = frozenset(
    (
        *("text", "completion", "tools", "history", "label", "paraphrases"),
        *_TALKS,
        *_QUESTIONS,
        *_ANSWERS,
    )
).union(_MORE, _SYSTEM, _LEARNED)
_YES_OR_NO = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
_SPEAKERS = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
}
"""The speaker in `from`, as ShareGPT and similar formats write it → the role in a chat template."""


def plain_name(name: str) -> str:
    """The name of a column as it is compared: spreadsheets write `Question` and ` answer`."""
    return name.strip().lower()


def twice(names: Iterable[str]) -> str | None:
    """What is wrong with the names of columns if two of them are the same. Only one of the two
    could be read, and it may be the empty one."""
    seen: dict[str, int] = {}
    for number, name in enumerate(names, 1):
        if (plain := plain_name(name)) and (first := seen.setdefault(plain, number)) != number:
            return f"the columns {first} and {number} are both called {name!r}; rename one of them"
    return None


@dataclass(frozen=True)
class RowColumns:
    named: Mapping[str, str]
    """Column of a row → its name in the dataset."""

    def reads(self, name: str) -> bool:
        """Whether a column may be used. A table has others, of types that nobody needs to read."""
        return name in self.named.values() or plain_name(name) in _NAMES

    def __call__(self, record: Columns) -> Columns:
        """The columns of a row: `messages` (possibly with `tools`), or `prompt` and `completion`,
        or `text`; and `is_learned`, if it is false. Raises ValueError if the record has none of the
        known columns, or if nobody can tell what its author meant."""
        given = {known: record[name] for known, name in self.named.items() if name in record}
        others = {plain_name(name): value for name, value in record.items()} | dict(record)
        for alternatives in (_QUESTIONS, _ANSWERS):
            if alternatives[0] in given:
                others = {key: others[key] for key in others if key not in alternatives}
        # A record may have the columns of several formats. Try the columns in the settings first.
        whole = others | given
        for columns in (given, whole):
            for form in (_conversation, _prompt_and_completion, _question_and_answer, _text):
                if found := form(columns, whole):
                    more: Columns = {} if _is_learned(whole, found) else {"is_learned": False}
                    return {**found, "paraphrases": paraphrases_in(whole), **more}
        raise ValueError(self._nothing_known(record))

    def _nothing_known(self, record: Columns) -> str:
        columns = ", ".join(map(repr, record)) or "(none)"
        asked = ", ".join(f'{known} = "{name}"' for known, name in self.named.items())
        return (
            f"nothing to learn from in the columns {columns}; the known columns are {KNOWN}; "
            f"[pipelines.data.columns] says {asked or 'nothing'}; name others there, as "
            'question = "q" and answer = "a"'
        )


def _conversation(columns: Columns, whole: Columns) -> Columns | None:
    for name in _TALKS:
        if columns.get(name) not in (None, "", []):
            return _with_context([_message(each) for each in _listed(columns, name)], whole)
    return None


def _prompt_and_completion(columns: Columns, whole: Columns) -> Columns | None:
    if not {"prompt", "completion"} <= columns.keys():
        return None
    prompt, completion = columns["prompt"], columns["completion"]
    if prompt is None and completion is None:
        return None  # a table has all columns for each row
    if prompt in ("", []):
        raise ValueError(
            "`prompt` is empty, and a server answers no empty prompt; write text rows as `text`"
        )
    if isinstance(prompt, list) and isinstance(completion, list):
        return _with_context([_message(each) for each in (*prompt, *completion)], whole)
    if any(whole.get(name) not in (None, "", []) for name in (*_SYSTEM, "history")):
        return _asked("prompt", "completion", columns, whole)
    return {"prompt": prompt, "completion": completion}


def _question_and_answer(columns: Columns, whole: Columns) -> Columns | None:
    question, answer = (_only(columns, names) for names in (_QUESTIONS, _ANSWERS))
    if question is None or answer is None:
        return None
    if columns[question] is None and columns[answer] is None:
        return None
    return _asked(question, answer, columns, whole)


def _text(columns: Columns, _: Columns) -> Columns | None:
    return {"text": columns["text"]} if "text" in columns else None


def _only(columns: Columns, names: Collection[str]) -> str | None:
    """The column among `names` that the record has. Raises ValueError if it may be two of them."""
    found = [name for name in names if name in columns]
    filled = [name for name in found if columns[name] not in (None, "")]
    if len(filled) > 1 and filled[-1] in _MORE:
        filled.pop()
    if len(filled) > 1:
        role = "question" if names is _QUESTIONS else "answer"
        raise ValueError(
            f"`{filled[0]}` and `{filled[1]}` may both be the {role}; name one under "
            f'[pipelines.data.columns], as {role} = "{filled[0]}"'
        )
    return next(iter(filled or found), None)


def _asked(question: str, answer: str, columns: Columns, whole: Columns) -> Columns:
    """A conversation of this question, with the columns that belong to it, and this answer."""
    more = [name for name in _MORE if name != question and whole.get(name) is not None]
    texts = [_text_of(columns, question), *(_text_of(whole, name) for name in more)]
    asked = "\n\n".join(filter(None, texts))
    if not asked:
        raise ValueError(f"`{question}` is empty, so nobody can ask for the answer")
    said = {"role": "assistant", "content": _text_of(columns, answer)}
    return _with_context([{"role": "user", "content": asked}, said], whole)


def _text_of(columns: Columns, name: str) -> str:
    value = columns[name]
    if not isinstance(value, str):
        raise ValueError(f"`{name}` holds {kind(value)}, not text")
    return value


def _listed(columns: Columns, name: str) -> list[Any]:
    """The list in a column. Tables often hold it as JSON text."""
    value = columns[name]
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ValueError(f"`{name}` holds text that is not JSON ({error})") from error
    if not isinstance(value, list):
        raise ValueError(f"`{name}` holds {kind(value)}; it must be a list")
    return value


def _message(message: Any) -> Any:
    """The message with `role` and `content`, even if it uses ShareGPT's `from` and `value`."""
    if not isinstance(message, dict) or not {"from", "value"} <= message.keys():
        return message
    speaker = message["from"]
    if not isinstance(speaker, str) or speaker not in _SPEAKERS:
        raise ValueError(f"a message is from {speaker!r}; write one of {', '.join(_SPEAKERS)}")
    return {**message, "role": _SPEAKERS[speaker], "content": message["value"]}


def _with_context(messages: list[Any], whole: Columns) -> Columns:
    """The conversation after the columns `system` and `history`, with the column `tools`."""
    before: list[Any] = []
    if whole.get("history") not in (None, "", []):
        before = list(chain.from_iterable(map(_earlier, _listed(whole, "history"))))
    messages = [*before, *messages]
    for name in _SYSTEM:
        if whole.get(name) not in (None, ""):
            said = {"role": "system", "content": _text_of(whole, name)}
            first = messages[0] if messages and isinstance(messages[0], dict) else {}
            if first.get("role") != "system":
                messages = [said, *messages]
            elif first.get("content") != said["content"]:
                raise ValueError(f"`{name}` and the first message are two different system prompts")
    return {"messages": messages, "tools": whole.get("tools")}


def _earlier(turn: Any) -> list[Any]:
    """The messages of an entry of `history`: a message, or a pair of a question and its answer."""
    if isinstance(turn, dict):
        return [_message(turn)]
    if isinstance(turn, list) and len(turn) == 2:
        return [{"role": r, "content": c} for r, c in zip(("user", "assistant"), turn, strict=True)]
    raise ValueError(
        f"`history` has {kind(turn)} in it; it must be a list of messages, or of pairs of a "
        "question and its answer"
    )


def paraphrases_in(whole: Columns) -> tuple[str, ...]:
    """Other wordings of the question. Raises ValueError if they are no list of texts."""
    if whole.get("paraphrases") in (None, "", []):
        return ()
    texts = _listed(whole, "paraphrases")
    for text in texts:
        if not isinstance(text, str) or not text.strip():
            found = kind(text) if not isinstance(text, str) else "an empty text"
            raise ValueError(f"`paraphrases` has {found} in it; it must be a list of questions")
    return tuple(dict.fromkeys(texts))


def _is_learned(whole: Columns, found: Columns) -> bool:
    """Whether the author wants the row to be learned. `label` is that of the format KTO (false: a
    bad answer), unless it is a word, such as the name of a class."""
    label = plain_name(str(whole.get("label")))
    is_class = "text" in found or not (label in _YES_OR_NO or label.isdigit())
    return _says_learn(whole, _LEARNED if is_class else (*_LEARNED, "label"))


def is_learned_turn(message: Columns) -> bool:
    """Whether the author wants this message of the assistant to be learned. Raises ValueError."""
    return _says_learn(message, _LEARNED_TURN)


def _says_learn(values: Columns, keys: Iterable[str]) -> bool:
    for key in keys:
        if (value := values.get(key)) in (None, ""):
            continue
        said = _YES_OR_NO.get(plain_name(str(value)))
        if said is None:
            raise ValueError(
                f"`{key}` is {value!r}, and may say that this is not to be learned; write true or "
                "false, or rename it"
            )
        if not said:
            return False
    return True


def kind(value: object) -> str:
    """The kind of a value, in words for an error message."""
    names = {dict: "an object", list: "a list", str: "text", type(None): "nothing"}
    return names.get(type(value), f"the value {value!r}")
