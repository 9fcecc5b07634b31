"""A server on the echo engine with one release, and a client."""

from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import openai
import pytest
from tokenizers import AddedToken

from serving.weights.release import Release
from serving.weights.release_store import set_current
from tests.echo_engine import EchoEngine
from tests.serving_fixtures import (
    CHAT_TEMPLATE,
    byte_tokenizer,
    echo_app,
    echo_release,
    running,
)


@dataclass
class Server:
    url: str
    release: Release
    client: openai.OpenAI
    engine: EchoEngine

    def post(self, **body: object) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=60)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    pipeline_dir = tmp_path_factory.mktemp("home") / "answers"
    tokenizer = byte_tokenizer()
    # The network has no such token.
    tokenizer.add_special_tokens([AddedToken("<image>", special=True)])
    release = echo_release(pipeline_dir, 1, chat_template=CHAT_TEMPLATE, tokenizer=tokenizer)
    set_current(pipeline_dir, release.id)
    engine = EchoEngine()
    with (
        running(echo_app(pipeline_dir, engine, max_sequences=16)) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield Server(url, release, client, engine)
