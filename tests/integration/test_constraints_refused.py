"""An engine refuses a generation: the request gets 400, with the field."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from serving.weights.release_store import set_current
from tests.serving_fixtures import echo_app, echo_release, running


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"allowed_token_ids": [1]}, "allowed_token_ids"),
    ],
)
def test_over_http(tmp_path: Path, body: dict[str, Any], param: str) -> None:
    set_current(tmp_path, echo_release(tmp_path, 1).id)
    with running(echo_app(tmp_path)) as url:
        asked = {"prompt": "Hello", "stream": True, **body}
        answer = httpx.post(f"{url}/v1/completions", json=asked)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["message"] == f"{param}: not supported by the engine echo; leave it out"
    assert (error["param"], error["code"]) == (param, "invalid_value")
