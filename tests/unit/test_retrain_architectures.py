"""Every architecture is trained and measured on what its own forward pass computes of a row alone.

Small networks with random weights, made from the config classes of transformers.
"""

from collections.abc import Callable, Iterator

import pytest
import torch
import transformers
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, PreTrainedModel

from pipeline.retrain.errors import BaseModelError
from pipeline.retrain.layout import layout_of, pack
from pipeline.retrain.loss import predict, row_losses, summed_loss
from pipeline.retrain.tokens import TokenSequence

VOCABULARY = 120
PLAIN = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2}
HEADS = PLAIN | {"num_attention_heads": 4, "max_position_embeddings": 256, "pad_token_id": None}
LLAMA = HEADS | {"num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 64}
GPT = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
LINEAR_ATTENTION = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "shared_expert_intermediate_size": 16,
}

PACKED: dict[str, dict[str, object]] = {
    "LlamaConfig": LLAMA,
    "Qwen2Config": LLAMA,
    "Qwen3Config": LLAMA,
    "MistralConfig": LLAMA | {"sliding_window": 16},
    "MixtralConfig": LLAMA | {"num_local_experts": 4},
    "Gemma2Config": LLAMA,
    "Gemma3TextConfig": LLAMA,
    "PhiConfig": HEADS,
    "Phi3Config": LLAMA,
    "Olmo2Config": LLAMA,
    "GraniteConfig": LLAMA | {"logits_scaling": 4.0},
    "CohereConfig": LLAMA,
    "GPT2Config": GPT,
    "GPTJConfig": GPT | {"rotary_dim": 4},
    "GPTNeoXConfig": HEADS | {"intermediate_size": 64},
}
WITHOUT_PREFIXES = {"MistralConfig", "Gemma2Config", "Gemma3TextConfig", "GPTJConfig"}
"""Those with a sliding window, or with another attention than that of torch."""
PADDED: dict[str, dict[str, object]] = {
    "OPTConfig": HEADS | {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "BloomConfig": {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "FalconConfig": HEADS,
    "MambaConfig": PLAIN | {"state_size": 8},
    "Lfm2Config": LLAMA | {"layer_types": ["conv", "full_attention"]},
    "Qwen3NextConfig": LLAMA | EXPERTS | LINEAR_ATTENTION | {"num_experts": 4},
    "GraniteMoeHybridConfig": HEADS
    | MAMBA
    | {
        "num_key_value_heads": 2,
        "layer_types": ["mamba", "attention"],
        "mamba_chunk_size": 16,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "shared_intermediate_size": 64,
        "logits_scaling": 2.0,
    },
    "FalconH1Config": LLAMA
    | MAMBA
    | {"mamba_d_ssm": 64, "mamba_chunk_size": 16, "lm_head_multiplier": 0.5},
}
OTHER_HEADS = [
    *("Gemma2Config", "GraniteConfig", "CohereConfig", "FalconH1Config"),
    *("GPTJConfig", "PhiConfig"),
]
"""Those whose output layer scales or bounds its logits, or has a bias."""


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Networks this small only wait for a second thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def network(name: str) -> PreTrainedModel:
    config = getattr(transformers, name)(**(PACKED | PADDED)[name])
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        # Weights at their start are so small that attention changes nearly nothing.
        for parameter in model.parameters():
            parameter.mul_(3 if parameter.ndim > 1 else 1)
    return model


def rows() -> list[TokenSequence]:
    """Rows of many lengths; of most of them, only the end is learned."""
    generator = torch.Generator().manual_seed(5)
    found = []
    for row, length in enumerate((5, 23, 9, 40, 24, 7, 8)):
        ids = torch.randint(VOCABULARY, (length,), generator=generator).tolist()
        learned = [position >= (1 if row == 3 else length - 4) for position in range(length)]
        found.append(TokenSequence(tuple(ids), tuple(learned), row))
    return found


def rows_that_begin_alike() -> list[TokenSequence]:
    """As with a chat template: 12 tokens in common, and twice 3 more."""
    beginning = tuple(range(12))
    found = []
    for row, each in enumerate(rows()):
        before = beginning + (90, 91, 92) * (row < 2)
        ids, learned = before + each.token_ids, (False,) * len(before) + each.learned
        found.append(TokenSequence(ids, learned, row))
    return found


def expected_layout(name: str) -> str:
    if name in PADDED:
        return "padded"
    return "packed" if name in WITHOUT_PREFIXES else "prefixed"


def own_nats(model: PreTrainedModel, sequence: TokenSequence) -> torch.Tensor:
    """The loss of a row by the model's own forward pass, with nothing beside it."""
    ids = torch.tensor([sequence.token_ids])
    logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
    nats = cross_entropy(logits, ids[0, 1:], reduction="none")
    return nats[torch.tensor(sequence.learned[1:])].sum()


@pytest.mark.parametrize("name", [*PACKED, *PADDED])
def test_a_row_among_others_has_the_loss_that_it_has_alone(name: str) -> None:
    """Also if all begin with the same tokens."""
    model = network(name)
    assert layout_of(model) == expected_layout(name)
    assert len(pack([len(each.token_ids) for each in rows()], 128)) == 1
    for found in (rows(), rows_that_begin_alike(), rows_that_begin_alike()[:2]):
        with torch.no_grad():
            expected = [float(own_nats(model, each)) for each in found]
        assert [each.nats for each in row_losses(model, found)] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("name", ["LlamaConfig", "BloomConfig", *OTHER_HEADS])
@pytest.mark.parametrize("make_rows", [rows, rows_that_begin_alike])
def test_the_gradients_of_the_sliced_loss_are_those_of_the_model_itself(
    name: str, make_rows: Callable[[], list[TokenSequence]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.retrain.loss.slice_rows", lambda vocab_size: 5)
    model = network(name)
    found = make_rows()
    torch.stack([own_nats(model, each) for each in found]).sum().backward()
    expected = {key: each.grad for key, each in model.named_parameters() if each.grad is not None}
    model.zero_grad()
    torch.autograd.backward(summed_loss(model, *predict(model, [found]))[0])
    assert expected.keys() == {
        key for key, each in model.named_parameters() if each.grad is not None
    }
    for key, each in model.named_parameters():
        if each.grad is not None:
            torch.testing.assert_close(each.grad, expected[key], rtol=1e-3, atol=1e-4)


def test_any_form_of_output_layer_is_trained() -> None:
    model = network("LlamaConfig")
    layer = model.get_output_embeddings()
    layer.register_forward_hook(lambda _, __, logits: logits.square())
    expected, found = (
        own_nats(model, rows()[1]),
        summed_loss(model, *predict(model, [rows()[1:2]]))[0],
    )
    torch.testing.assert_close(found, expected)
    of_layer = torch.autograd.grad(expected, layer.weight)
    torch.testing.assert_close(torch.autograd.grad(found, layer.weight), of_layer)


def test_a_model_that_padding_disturbs_is_refused() -> None:
    model = network("BloomConfig")
    # The mean over the row stands for whatever looks at the whole row.
    model.base_model.ln_f.register_forward_hook(
        lambda _, __, hidden: hidden + hidden.mean(1, keepdim=True)
    )
    with pytest.raises(BaseModelError, match="padding at the end of a text changes what"):
        row_losses(model, rows())
