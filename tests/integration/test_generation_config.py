"""`generation_config.json` says what a request that leaves a field out, or sends null, gets."""

import json
from pathlib import Path
from typing import Any

import httpx

from serving.weights.publish import publish_folder
from serving.weights.release_store import set_current
from tests.scripted_engine import ScriptedEngine
from tests.serving_fixtures import echo_app, echo_release, running


def test_a_request_gets_the_releases_defaults_and_its_own_fields_win(tmp_path: Path) -> None:
    folder = tmp_path / "made" / echo_release(tmp_path / "made", 1).id
    written = {"temperature": 0.0, "repetition_penalty": 5.0, "max_new_tokens": 7}
    (folder / "generation_config.json").write_text(json.dumps(written))
    releases = tmp_path / "answers"
    set_current(releases, publish_folder(releases, folder).id)
    engine = ScriptedEngine()
    with running(echo_app(releases, engine)) as url:

        def told(**fields: Any) -> tuple[float, float, int]:
            answer = httpx.post(f"{url}/v1/completions", json={"prompt": "Hi", **fields})
            assert answer.is_success, answer.text
            asked = engine.told[-1]
            return asked.temperature, asked.repetition_penalty, asked.max_tokens

        # As OpenAI and vLLM: a completion without `max_tokens` has 16 tokens, whatever the release.
        assert told() == (0, 5, 16)
        assert told(temperature=None, repetition_penalty=None, max_tokens=None) == (0, 5, 16)
        assert told(temperature=2, repetition_penalty=1, max_tokens=20) == (2, 1, 20)
