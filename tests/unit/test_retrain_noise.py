"""Noise: what a model finds no likelier than the same tokens in random order."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pipeline.retrain.noise import count_noise, scrambled
from pipeline.retrain.scoring import row_losses
from pipeline.retrain.tokens import Sequence


def sequence(token_ids: range, row: int = 0, prompt: int = 1) -> Sequence:
    learned = (False,) * prompt + (True,) * (len(token_ids) - prompt)
    return Sequence(tuple(token_ids), learned, row)


def test_the_prompt_and_the_end_stay_in_place() -> None:
    found = scrambled(sequence(range(20), prompt=5))
    assert found is not None
    assert found.token_ids[:5] == tuple(range(5))
    assert found.token_ids[-1] == 19
    assert found.token_ids != tuple(range(20))
    assert sorted(found.token_ids) == list(range(20))
    assert found == scrambled(sequence(range(20), prompt=5))


def test_a_row_that_has_one_order_only_cannot_be_told() -> None:
    assert scrambled(sequence(range(3))) is None
    assert scrambled(Sequence((7,) * 9, (False, *(True,) * 8), 0)) is None


def test_a_model_tells_what_it_has_learned_from_noise() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
            vocab_size=64,
        )
    )
    rows = [sequence(range(start, start + 12), row) for row, start in enumerate(range(0, 40, 4))]
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    ids = torch.tensor([row.token_ids for row in rows])
    for _ in range(30):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    noise = [row for each in rows if (row := scrambled(each)) is not None]

    new, known = count_noise(
        model, noise, rows, losses=(row_losses(model, noise), row_losses(model, rows))
    )
    assert (known.noisy, known.rows) == (0, 10)
    assert new.share >= 0.6
    nothing, _ = count_noise(model, [], rows, losses=([], row_losses(model, rows)))
    assert (nothing.rows, nothing.share) == (0, 0.0)
