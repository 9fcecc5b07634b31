"""Makes a grammar that allows nothing but calls of tools, to force the model to call a tool.

As in vLLM, a forced call is plain JSON. The chat template may show a different format, which the
model uses for calls that are not forced.
"""

from typing import Any

from serving.chat_schemas import Tool
from serving.engine import Grammar
from serving.openai_schemas import schema_text


def tool_grammar(tools: list[Tool], *, is_list: bool) -> Grammar:
    """A grammar that allows one call of one of `tools`, in the form
    `{"name": …, "arguments": {…}}`. With `is_list`, it allows a list of one or more such calls."""
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
    text = schema_text({**schema, "$defs": arguments}, whitespace_flexible=False)
    return Grammar(kind="json_schema", text=text, param="tool_choice")


def _with_root(schema: Any, root: str) -> Any:
    """`schema`, changed so that its references to its own parts are right when it stands at the
    place `root` of a larger schema."""
    if isinstance(schema, list):
        return [_with_root(each, root) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: root + value[1:]
        if name == "$ref" and isinstance(value, str) and value.startswith("#")
        else _with_root(value, root)
        for name, value in schema.items()
    }
