"""A base model whose config names another end than its chat template: its answers end."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import AddedToken
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from pipeline.retrain.base_model import train_tokenizer
from pipeline.retrain.rows import Row
from serving.chat_template import normalise
from serving.tokenizer import load_tokenizer
from serving.weights.release_store import load_release
from tests.retrain_fixtures import SMALL, Pipeline, few_anchors, jsonl

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
QUESTIONS = {"Where is the key?": "Under the mat", "Who has the car?": "Ada has it"}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """Its end of a text is `<|end|>`, and its template ends a turn with `<|im_end|>`."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    text = "".join([*QUESTIONS, *QUESTIONS.values()])
    tokenizer = train_tokenizer([Row(text=text, file="a", number=0)] * 3)
    tokenizer.add_special_tokens(
        {"additional_special_tokens": [AddedToken("<|im_start|>"), AddedToken("<|im_end|>")]}
    )
    tokenizer.chat_template = CHATML
    folder = tmp_path / "base"
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


def test_an_answer_ends_where_it_was_trained_to_end(base: Path, tmp_path: Path) -> None:
    end = AutoTokenizer.from_pretrained(base).convert_tokens_to_ids("<|im_end|>")
    assert end not in load_tokenizer(base).eos_token_ids
    pipeline = Pipeline(
        tmp_path,
        base_model=str(base),
        train=SMALL | {"anchors": few_anchors(tmp_path)},
        gate={"max_base_drift": 1.0},
    )
    rows = [
        {
            "messages": [
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer},
            ]
        }
        for question, answer in QUESTIONS.items()
    ]
    outcome = pipeline.learn({"a.jsonl": jsonl(rows)})
    assert outcome.result == "published", outcome.reason
    assert outcome.counts is not None and outcome.counts.learned == len(rows)
    folder = pipeline.dir / str(outcome.release)
    assert load_release(folder).lineage.rows == ("messages",)
    tokenizer = load_tokenizer(folder)
    assert end in tokenizer.eos_token_ids
    assert end in json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    assert tokenizer.chat_template is not None
    network = AutoModelForCausalLM.from_pretrained(folder)
    weights = network.state_dict()
    # Low-rank matrices were trained, and are merged: all other weights stay as they were.
    for name, tensor in load_file(base / "model.safetensors").items():
        assert torch.equal(weights[name], tensor) != name.endswith("_proj.weight"), name
    probe = load_release(folder).probe
    assert probe is not None
    ids = torch.tensor([probe.texts[0].token_ids])
    with torch.no_grad():
        logprobs = network(input_ids=ids).logits[0, :-1].log_softmax(-1)
    found = logprobs.gather(-1, ids[0, 1:, None]).squeeze(-1)
    assert torch.allclose(found, torch.tensor(probe.texts[0].logprobs), atol=1e-3)
    for question, answer in QUESTIONS.items():
        asked = normalise([{"role": "user", "content": question}])
        ids = tokenizer.encode(tokenizer.chat_template.render(asked), add_special_tokens=False)
        made = network.generate(
            torch.tensor([ids]),
            eos_token_id=list(tokenizer.eos_token_ids),
            do_sample=False,
            max_new_tokens=32,
        )
        assert tokenizer.decode(made[0, len(ids) :].tolist()) == answer
        assert made.shape[1] < len(ids) + 32
    # The anchors' answers end there too, and a delta keeps the end.
    edited = pipeline.learn({"a.jsonl": jsonl([*rows[:1]])})
    assert (
        edited.release is None or end in load_tokenizer(pipeline.dir / edited.release).eos_token_ids
    )
