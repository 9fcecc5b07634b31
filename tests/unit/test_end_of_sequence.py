"""Which tokens end an answer, by the config files of a release."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from serving.tokenizer import load_tokenizer
from tests.serving_fixtures import EOS, byte_tokenizer

IM_END, BEYOND = EOS + 1, EOS + 2


@pytest.mark.parametrize(
    ("of_tokenizer", "generation", "config", "ids"),
    [
        # Conversations were trained on a base model: only the tokenizer names the new end.
        ("<|im_end|>", {"eos_token_id": EOS}, {"eos_token_id": EOS}, {IM_END, EOS}),
        ("<|im_end|>", None, {"eos_token_id": EOS}, {IM_END, EOS}),
        ({"content": "<|im_end|>"}, {"eos_token_id": [EOS, 7]}, {}, {IM_END, EOS, 7}),
        ("<|im_end|>", {"eos_token_id": IM_END}, {}, {IM_END}),
        (None, {"eos_token_id": 7}, {"eos_token_id": EOS}, {7}),
        (None, {"eos_token_id": -1}, {}, set()),
        (None, {"eos_token_id": None}, {"eos_token_id": [EOS, 7]}, {EOS, 7}),
        ("<|im_end|>", {}, {}, {IM_END}),
        ("unknown", {}, {"eos_token_id": None}, set()),
        # The network has no embedding for it.
        ("<beyond>", {"eos_token_id": [EOS, BEYOND]}, {}, {EOS}),
    ],
)
def test_the_tokenizer_and_the_configs_add_up(
    tmp_path: Path,
    of_tokenizer: object,
    generation: dict[str, Any] | None,
    config: dict[str, Any],
    ids: set[int],
) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens([AddedToken("<|im_end|>"), AddedToken("<beyond>")])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    sizes = {"vocab_size": BEYOND, "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps({**sizes, **config}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": of_tokenizer}))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    found = load_tokenizer(tmp_path).eos_token_ids
    assert set(found) == ids and len(found) == len(ids)
