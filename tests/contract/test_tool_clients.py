"""LangChain's `ChatOpenAI` and LiteLLM call tools through the server, whole and streamed.

They run in an environment of their own, which `make test-clients` makes and names here.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest

from serving.weights.release_store import set_current
from tests import tools_client_program
from tests.scripted_engine import ScriptedEngine
from tests.serving_fixtures import echo_app, echo_release, running

PYTHON = os.environ.get("TEST_CLIENTS_PYTHON")

pytestmark = [
    pytest.mark.skipif(PYTHON is None, reason="make test-clients has it"),
    pytest.mark.clients,
]

TEMPLATE = """
{%- if tools %}{{ tools | tojson }} Call with <tool_call>{"name": …}</tool_call>{% endif %}
{%- for message in messages %}{{ message.role }}: {{ message.content }}
{% endfor %}assistant: """
CALL = '<tool_call>\n{"name": "Weather", "arguments": {"city": "Wien"}}\n</tool_call>'


@pytest.mark.parametrize("client", ["langchain", "litellm"])
def test_a_client_calls_a_tool(tmp_path: Path, client: str) -> None:
    assert PYTHON is not None
    release = echo_release(tmp_path, 1, chat_template=TEMPLATE, context=4096)
    set_current(tmp_path, release.id)
    engine = ScriptedEngine(f"I look. {CALL}", f"I look. {CALL}", "It is warm.")
    with running(echo_app(tmp_path, engine)) as url:
        done = subprocess.run(
            [PYTHON, tools_client_program.__file__, client, url],
            capture_output=True,
            text=True,
            timeout=240,
            env={
                **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
                "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # which it would download otherwise
                "LANGSMITH_TRACING": "false",
            },
        )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    calls = [["Weather", {"city": "Wien"}]]
    assert found == {"whole": calls, "streamed": calls, "plain": "It is warm."}
