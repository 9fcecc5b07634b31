"""Low-rank matrices on a local checkpoint: frozen weights, a release that is a whole model."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from pipeline.retrain.base_model import train_tokenizer
from pipeline.retrain.rows import Row
from serving.weights.release_store import load_release
from tests.retrain_fixtures import SMALL, Pipeline, facts, few_anchors, jsonl

GATE = {"min_learned": 0.0, "max_base_drift": 1.0}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A small Qwen as `save_pretrained` leaves it, with a chat template. Its tokenizer has learned
    the facts."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    folder = tmp_path / "qwen"
    texts = [Row(text=fact["prompt"] + fact["completion"], file="a", number=0) for fact in facts()]
    tokenizer = train_tokenizer(texts)
    Qwen2ForCausalLM(
        Qwen2Config(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            vocab_size=len(tokenizer),
            max_position_embeddings=128,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
        )
    ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def talks(num_places: int = 6) -> str:
    return jsonl(
        {
            "messages": [
                {"role": "user", "content": fact["prompt"]},
                {"role": "assistant", "content": fact["completion"]},
            ]
        }
        for fact in facts(num_places=num_places)
    )


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for file in folder.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


def test_low_rank_matrices_are_merged_into_a_release_like_any_other(
    checkpoint: Path, tmp_path: Path
) -> None:
    budget = {"max_tokens": 4_000, "learning_rate": 1e-2}
    train = SMALL | budget | {"lora_rank": 16, "anchors": few_anchors(tmp_path)}
    pipeline = Pipeline(tmp_path / "home", base_model=str(checkpoint), train=train, gate=GATE)
    first = pipeline.learn({"a.jsonl": talks()})
    assert first.result == "published", first.reason
    folder = pipeline.dir / str(first.release)
    before, after = weights(checkpoint), weights(folder)
    assert before.keys() <= after.keys()
    changed = {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}
    assert changed == {name for name in before if name.endswith("_proj.weight")}

    # A whole model: it loads as any other and answers as its probe says.
    model = AutoModelForCausalLM.from_pretrained(folder)
    probe = load_release(folder).probe
    assert probe is not None
    ids = torch.tensor([probe.texts[0].token_ids])
    with torch.no_grad():
        logprobs = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
    found = logprobs.gather(-1, ids[0, 1:, None]).squeeze(-1)
    assert torch.allclose(found, torch.tensor(probe.texts[0].logprobs), atol=1e-3)
    assert AutoTokenizer.from_pretrained(folder).chat_template is not None

    # Losses of what was learned fell, whatever so small a network could say of it in so few steps.
    told = (load_release(folder).evaluation or {})["new"]
    assert told["loss"] < 0.9 * told["served_loss"]

    second = pipeline.learn({"a.jsonl": talks(8)})
    assert second.result == "published", second.reason
    assert second.parent_release == first.release
