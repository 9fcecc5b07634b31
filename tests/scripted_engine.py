"""An engine that answers with texts that a test gives it, and otherwise as the echo engine does."""

from collections.abc import AsyncGenerator

from tokenizers import Tokenizer

from serving.engine import Generation, Step
from tests.echo_engine import EchoEngine
from tests.serving_fixtures import EOS, byte_tokenizer


class ScriptedEngine(EchoEngine):
    def __init__(self, *texts: str, tokenizer: Tokenizer | None = None) -> None:
        super().__init__()
        self.tokenizer = tokenizer or byte_tokenizer()
        self.texts = list(texts)
        """Of the next generations, in turn."""
        self.told: list[Generation] = []

    async def generate(self, release_id: str, generation: Generation) -> AsyncGenerator[Step, None]:
        is_probe = generation.num_prompt_logprobs is not None
        if not is_probe:
            self.told.append(generation)
        if is_probe or not self.texts:
            async for step in super().generate(release_id, generation):
                yield step
            return
        token_ids = self.tokenizer.encode(self.texts.pop(0)).ids
        for token_id in token_ids[: generation.max_tokens]:
            is_stop = token_id in generation.stop_token_ids
            yield Step(token_ids=(token_id,), finish_reason="stop" if is_stop else None)
            if is_stop:
                return
        if len(token_ids) >= generation.max_tokens:
            yield Step(finish_reason="length")
        else:
            yield Step(token_ids=(EOS,), finish_reason="stop")
