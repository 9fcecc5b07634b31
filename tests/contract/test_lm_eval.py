"""`lm-eval`, as docs/serving.md calls it, finds the loglikelihoods that `transformers` computes.

It runs in an environment of its own, which `make test-clients` makes and names here.
"""

import json
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from serving.engines.torch_engine.engine import create_engine
from serving.weights.publish import publish_state_dict
from serving.weights.release_store import set_current
from tests.serving_fixtures import CONTEXT, byte_tokenizer, echo_app, running
from tests.torch_engine_fixtures import build, llama_config

LM_EVAL = os.environ.get("TEST_LM_EVAL")

pytestmark = [
    pytest.mark.skipif(LM_EVAL is None, reason="make test-clients has it"),
    pytest.mark.clients,
]

DOCS = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
(BLOCK,) = (block for block in re.findall(r"```sh\n(.*?)```", DOCS, re.S) if "lm_eval" in block)

QUESTIONS: tuple[dict[str, Any], ...] = (
    {"question": "The sky is", "choices": [" blue", " green and far away"], "answer": 0},
    {"question": "Grüße aus", "choices": [" Wien", " 世界"], "answer": 0},
    {"question": "One and one is", "choices": [" two", " three", "!"], "answer": 0},
)

TASK = """
task: my_task
dataset_path: json
dataset_kwargs:
  data_files: {{test: {questions}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: choices
doc_to_target: answer
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""


@torch.inference_mode()
def loglikelihood(network: Any, context: str, continuation: str) -> tuple[float, bool]:
    tokenizer = byte_tokenizer()
    before, after = (tokenizer.encode(text).ids for text in (context, continuation))
    logprobs = network(torch.tensor([before + after])).logits[0].log_softmax(-1)
    at = range(len(before) - 1, len(before) + len(after) - 1)
    chosen = logprobs[at, after]
    return float(chosen.sum()), bool((logprobs[at].argmax(-1) == torch.tensor(after)).all())


def test_it_finds_the_loglikelihoods_that_transformers_computes(tmp_path: Path) -> None:
    files, pipeline_dir = tmp_path / "files", tmp_path / ".pipeline" / "releases" / "answers"
    network = build(llama_config(vocab_size=257, max_position_embeddings=CONTEXT))
    network.config.save_pretrained(files)
    PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(), eos_token="<eos>").save_pretrained(
        files
    )
    release = publish_state_dict(pipeline_dir, network.state_dict(keep_vars=True), files_dir=files)
    set_current(pipeline_dir, release.id)
    questions = tmp_path / "questions.jsonl"
    questions.write_text("".join(json.dumps(each) + "\n" for each in QUESTIONS))
    (tmp_path / "my-tasks").mkdir()
    (tmp_path / "my-tasks" / "my_task.yaml").write_text(TASK.format(questions=questions))
    engine = create_engine(num_threads=1, kv_cache_bytes=64 << 20)
    with running(echo_app(pipeline_dir, engine)) as url:
        assert LM_EVAL is not None
        program, *arguments = shlex.split(
            BLOCK.replace("http://127.0.0.1:8000", url).replace("\\\n", " ")
        )
        assert program == "lm_eval"
        done = subprocess.run(
            [LM_EVAL, *arguments, "--output_path", "out", "--log_samples"],
            cwd=tmp_path,
            env={
                **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
                "HF_HOME": str(tmp_path / "cache"),
                "HF_HUB_OFFLINE": "1",
                "HF_DATASETS_OFFLINE": "1",
            },
            capture_output=True,
            text=True,
            timeout=240,
        )
    assert done.returncode == 0, done.stderr
    (samples,) = (tmp_path / "out").rglob("samples_my_task_*.jsonl")
    found = {}
    for line in samples.read_text().splitlines():
        sample = json.loads(line)
        found[sample["doc"]["question"]] = [response[0] for response in sample["resps"]]
    assert found.keys() == {each["question"] for each in QUESTIONS}
    for each in QUESTIONS:
        answers = found[each["question"]]
        for choice, (logprob, is_greedy) in zip(each["choices"], answers, strict=True):
            expected, is_best = loglikelihood(network, each["question"], choice)
            assert float(logprob) == pytest.approx(expected, abs=1e-3)
            assert (str(is_greedy) == "True") == is_best
