"""What a user of LangChain or LiteLLM writes to let a model call a tool.

Runs in the environment of the client programs: `tools_client_program.py CLIENT URL`. Prints one
line of JSON: the calls of a whole answer, those of a stream, and the text of a plain stream.
"""

import json
import sys
from typing import Any

QUESTION = "Is it warm in Wien?"
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "Weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


def langchain(url: str) -> dict[str, Any]:
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model="answers", base_url=f"{url}/v1", api_key="none", max_retries=0)
    bound = model.bind_tools([TOOL])
    whole: Any = bound.invoke(QUESTION)
    joined: Any = None
    for chunk in bound.stream(QUESTION):
        joined = chunk if joined is None else joined + chunk
    plain = "".join(str(chunk.content) for chunk in model.stream(QUESTION))
    return {
        "whole": [[call["name"], call["args"]] for call in whole.tool_calls],
        "streamed": [[call["name"], call["args"]] for call in joined.tool_calls],
        "plain": plain,
    }


def litellm(url: str) -> dict[str, Any]:
    import litellm

    def ask(**body: Any) -> Any:
        return litellm.completion(
            model="hosted_vllm/answers",
            api_base=f"{url}/v1",
            api_key="none",
            messages=[{"role": "user", "content": QUESTION}],
            **body,
        )

    def calls(answer: Any) -> list[list[Any]]:
        found = answer.choices[0].message.tool_calls or []
        return [[call.function.name, json.loads(call.function.arguments)] for call in found]

    whole = ask(tools=[TOOL])
    joined = litellm.stream_chunk_builder(list(ask(tools=[TOOL], stream=True)))
    plain = "".join(chunk.choices[0].delta.content or "" for chunk in ask(stream=True))
    try:
        ask(max_tokens=1_000_000)
    except litellm.ContextWindowExceededError:
        pass
    else:
        raise AssertionError("an answer that does not fit into the context")
    return {"whole": calls(whole), "streamed": calls(joined), "plain": plain}


if __name__ == "__main__":
    client, url = sys.argv[1:]
    print(json.dumps({"langchain": langchain, "litellm": litellm}[client](url)))
