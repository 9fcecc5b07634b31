"""Networks of some sizes as releases that a server takes: with a probe, and a tokenizer in which
every token has a text of its own, so that each is an event of a stream."""

import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, int]] = {
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    },
    "7M": {
        "vocab_size": 8192,
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
    "50k": {
        "vocab_size": 50_000,
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    },
    "88M": {
        "vocab_size": 4096,
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
    },
    "350M": {
        "vocab_size": 40960,
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
    },
}
CONTEXT = 1024
PROMPT_TOKENS = 16
MIN_MARGIN = 1e-2
"""Between the logits of the best and the second token: batch shapes move the last bits of a logit,
and no answer is to hang on them."""
PROBE_TOKENS = ((72, 101, 108, 108, 111), tuple(range(1, 30)))
BFLOAT16_BOUND = 0.25
"""Nats by which an engine may differ that computes in it. What is looked at is speed."""


@dataclass(frozen=True, kw_only=True)
class Published:
    release_id: str
    folder: Path
    network: Any


def build(shape: str, seed: int) -> Any:
    """Random weights with clear choices."""
    from tests.torch_engine_fixtures import build as build_network
    from tests.torch_engine_fixtures import llama_config

    config = llama_config(
        **SHAPES[shape], max_position_embeddings=CONTEXT, tie_word_embeddings=True
    )
    return build_network(config, seed)


def publish(
    network: Any,
    pipeline_dir: Path,
    *,
    tokenizer_of: Path | None = None,
    probe: Any = None,
) -> Published:
    """The next release of a pipeline. Its tokenizer is that of the folder `tokenizer_of`, or one
    with a word for each token id. `probe` is one of its own, which a trained network needs: its
    numbers on random tokens are too wild for bfloat16."""
    from serving.weights.publish import publish_state_dict

    files = pipeline_dir.parent / "files"
    files.mkdir(parents=True, exist_ok=True)
    if tokenizer_of is None:
        _tokenizer(network.config.vocab_size).save(str(files / "tokenizer.json"))
        # What AutoTokenizer, and with it vLLM, wants to see.
        (files / "tokenizer_config.json").write_text(
            '{"tokenizer_class": "PreTrainedTokenizerFast"}'
        )
    else:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(tokenizer_of / name, files / name)
    network.config.architectures = [type(network).__name__]
    network.config.save_pretrained(files)
    release = publish_state_dict(
        pipeline_dir,
        network.state_dict(keep_vars=True),
        files_dir=files,
        probe=probe or _probe(network),
    )
    return Published(release_id=release.id, folder=pipeline_dir / release.id, network=network)


def _probe(network: Any) -> Any:
    import torch

    from pipeline.retrain.export import float32_bound
    from serving.weights.release import Probe, ProbeText

    texts = []
    for token_ids in PROBE_TOKENS:
        with torch.inference_mode():
            found = network(torch.tensor([token_ids])).logits[0].float().log_softmax(-1)
        logprobs = found[range(len(token_ids) - 1), token_ids[1:]].tolist()
        texts.append(ProbeText(token_ids=token_ids, logprobs=tuple(logprobs)))
    return Probe(
        dtype=str(network.dtype).removeprefix("torch."),
        texts=tuple(texts),
        bounds={
            "float32": float32_bound(text.logprobs for text in texts),
            "bfloat16": BFLOAT16_BOUND,
        },
    )


def prompt_of(seed: int, length: int = PROMPT_TOKENS) -> list[int]:
    return [(7 * seed + 13 * place + seed * place) % 250 for place in range(length)]


def right_texts(
    published: Sequence[Published],
    num_prompts: int,
    max_tokens: int,
    candidates: Iterable[list[int]] | None = None,
) -> tuple[list[list[int]], Mapping[tuple[str, int], str]]:
    """Those of the candidates whose greedy answers are clear and of `max_tokens` tokens on every
    release, and these answers by release and number of the prompt: of `transformers`, which shares
    nothing with an engine."""
    import torch

    from serving.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(published[0].folder)
    prompts: list[list[int]] = []
    texts: dict[tuple[str, int], str] = {}
    for prompt in candidates or map(prompt_of, range(1, 1 + 40 * num_prompts)):
        if len(prompts) == num_prompts:
            break
        answers = {}
        for each in published:
            with torch.inference_mode():
                answer = each.network.generate(
                    torch.tensor([prompt]),
                    attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                    max_new_tokens=max_tokens,
                    do_sample=False,
                    output_scores=True,
                    return_dict_in_generate=True,
                    pad_token_id=0,
                )
            if len(answer.scores) < max_tokens:
                break  # it ended, but the requests of a bench ignore the end token
            best = torch.stack(answer.scores)[:, 0].topk(2).values
            if float((best[:, 0] - best[:, 1]).min()) < MIN_MARGIN:
                break
            # A server's text goes on after that of the prompt, for example with a space.
            whole = tokenizer.decode(answer.sequences[0].tolist())
            answers[each.release_id] = whole.removeprefix(tokenizer.decode(prompt))
        else:
            if len(set(answers.values())) == len(published):
                texts |= {(id, len(prompts)): text for id, text in answers.items()}
                prompts.append(prompt)
    if len(prompts) < num_prompts:
        raise RuntimeError(f"too few prompts with a margin of {MIN_MARGIN}")
    return prompts, texts


def _tokenizer(vocab_size: int) -> Any:
    from tokenizers import Tokenizer, models

    words = {f"<{number}>": number for number in range(vocab_size)}
    return Tokenizer(models.WordLevel(words, unk_token="<0>"))
