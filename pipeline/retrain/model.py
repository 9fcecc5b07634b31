"""Loads a causal language model and its tokenizer, for training and for measuring; and computes its
output layer (`Head`): from hidden states to the logits that its own forward pass computes.

The output layer of most models is one matrix. Some models also add a bias, scale the logits, or cap
them. No single key of the config says which of these a model does. So this module tries what the
config suggests, and compares the results with the model's own logits.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import date
from itertools import product
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.nn.functional import linear, pad
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.logging import disable_progress_bar

from pipeline.retrain.base_model import PRESETS, longest_sequence
from pipeline.retrain.errors import BaseModelError
from pipeline.retrain.layout import (
    ROUNDED_TO,
    close_to,
    in_evaluation,
    last_hidden_states,
    random_document,
)
from pipeline.retrain.settings import RetrainSettings
from serving.chat_template import PROMPT_DATE
from serving.errors import first_line

LORA_RANK = 128
SCALES = ("logit_scale", "logits_scaling", "lm_head_multiplier")
"""Keys of a config that hold a scale. Some models multiply the logits by it, and others divide."""
SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap")
"""Keys of a config that hold a cap: no logit is larger than this number."""
_NUM_TOKENS = 16
_LARGEST_LOGIT = 100.0
"""For the comparison, the logits are scaled up to this size. On small logits, the effect of a cap
of 30 would be too small to see."""


@dataclass(kw_only=True)
class LoadedModel:
    model: PreTrainedModel
    """Training changes this model in place. Its weights are in float32. But on a GPU, weights that
    stay frozen (low-rank training) keep the dtype in which they are stored."""
    tokenizer: PreTrainedTokenizerBase
    folder: Path
    """The folder from which the model and the tokenizer were loaded."""
    dtype: torch.dtype
    """The dtype in which the weights are stored."""
    max_length: int
    """The largest number of tokens that the model computes as one sequence."""


def load_model(folder: Path, settings: RetrainSettings) -> LoadedModel:
    """Load the model and the tokenizer in `folder`. Raises BaseModelError if the folder holds no
    causal language model that this package can train."""
    disable_progress_bar()  # it would fill the job's log
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer, max_length = load_tokenizer(folder, settings)
    with _translated(folder):
        dtype = AutoConfig.from_pretrained(folder).dtype or torch.float32
        frozen = usual_rank(settings) > 0 and device.type == "cuda"
        model, report = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype if frozen else torch.float32, output_loading_info=True
        )
    if missing := sorted(report["missing_keys"]):
        # transformers has filled these weights with random numbers.
        raise BaseModelError(
            f"{folder} has no weights called {missing[0]} ({len(missing)} are missing); take a "
            "checkpoint whose weights have the names that transformers gives them"
        )
    model = model.to(device)
    head_of(model)  # raises BaseModelError if its logits cannot be computed from hidden states
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        folder=folder,
        dtype=dtype,
        max_length=max_length,
    )


def load_tokenizer(folder: Path, settings: RetrainSettings) -> tuple[PreTrainedTokenizerBase, int]:
    """Load the tokenizer in `folder`, but no weights. Returns it with the largest number of tokens
    that the model computes as one sequence. Raises BaseModelError."""
    with _translated(folder):
        config = AutoConfig.from_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
    if tokenizer.eos_token_id is None:
        raise BaseModelError(f"the tokenizer in {folder} has no end-of-sequence token; add one")
    if "strftime_now" in str(tokenizer.chat_template):
        tokenizer.init_kwargs.setdefault(PROMPT_DATE, date.today().isoformat())
    context = getattr(config, "max_position_embeddings", None)
    return tokenizer, longest_sequence(settings.train.max_length, settings.base_model, context)


@contextmanager
def _translated(folder: Path) -> Iterator[None]:
    """Turns the errors of transformers into a BaseModelError."""
    try:
        yield
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        reason = first_line(error)
        raise BaseModelError(f"{folder} cannot be loaded as a causal model: {reason}") from error


def usual_rank(settings: RetrainSettings) -> int:
    """The rank of the matrices that low-rank training adds; 0 if all weights are trained."""
    if settings.train.lora_rank is not None:
        return settings.train.lora_rank
    return 0 if settings.base_model in PRESETS else LORA_RANK


@dataclass(frozen=True, slots=True)
class Head:
    weight: Tensor
    """(V, H)"""
    bias: Tensor | None = None
    """(V,)"""
    scale: float = 1.0
    softcap: float | None = None

    def logits(self, hidden: Tensor) -> Tensor:
        """(N, H) → (N, V), in float32. The caller may change the result in place."""
        rows = pad_rows(hidden.to(self.weight.dtype))
        return self.shaped(linear(rows, self.weight, self.bias)[: len(hidden)].float())

    def shaped(self, logits: Tensor) -> Tensor:
        """Apply the scale and the cap to `logits`, the products of the matrix and the hidden
        states."""
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = (logits / self.softcap).tanh() * self.softcap
        return logits

    def cast_for(self, hidden: Tensor) -> "Head":
        """This head in the dtype in which a matrix product with `hidden` is computed: the dtype of
        autocast if autocast is on, and otherwise the dtype of the weight."""
        device = hidden.device.type
        if not torch.is_autocast_enabled(device):
            return self
        dtype = torch.get_autocast_dtype(device)
        bias = None if self.bias is None else self.bias.to(dtype)
        return replace(self, weight=self.weight.to(dtype), bias=bias)


def pad_rows(rows: Tensor) -> Tensor:
    """(N, …) → (M, …). Under autocast, rows of zeros are added until their number is a multiple of
    `ROUNDED_TO`. Otherwise M is N."""
    if not torch.is_autocast_enabled(rows.device.type):
        return rows
    return pad(rows, (0, 0, 0, -len(rows) % ROUNDED_TO))


_shapes: WeakKeyDictionary[PreTrainedModel, tuple[float, float | None]] = WeakKeyDictionary()


def head_of(model: PreTrainedModel) -> Head:
    """The output layer of `model`, with its current weights.

    The first call for a model finds the scale and the cap, by comparison with the model's own
    logits on a few tokens. Raises BaseModelError if no known form of output layer gives these
    logits.
    """
    layer = model.get_output_embeddings()
    if not isinstance(layer, torch.nn.Linear):
        raise BaseModelError(
            f"a {type(model).__name__} cannot be trained here: its output layer is not one matrix "
            f"but {layer!r}; take another base model"
        )
    if model not in _shapes:
        with in_evaluation(model):
            _shapes[model] = _measure(model, layer)
    return Head(layer.weight, layer.bias, *_shapes[model])


def _measure(model: PreTrainedModel, layer: torch.nn.Linear) -> tuple[float, float | None]:
    """The scale and the cap with which the output layer gives the model's own logits."""
    token_ids = random_document(model, _NUM_TOKENS, seed=0)[None]
    products = Head(layer.weight, layer.bias).logits(last_hidden_states(model, token_ids)[0])
    factor = _LARGEST_LOGIT / float(products.abs().max())
    handle = layer.register_forward_hook(lambda _, __, products: products * factor)
    try:
        expected = model(input_ids=token_ids.to(model.device), use_cache=False).logits[0]
    finally:
        handle.remove()
    for scale, softcap in _candidates(model):
        head = Head(layer.weight, layer.bias, scale, softcap)
        if close_to(head.shaped(products * factor), expected):
            return scale, softcap
    raise BaseModelError(
        f"a {type(model).__name__} cannot be trained here: its logits are not those of its output "
        f"layer, with or without a scale ({', '.join(SCALES)}) or a cap ({', '.join(SOFTCAPS)}) "
        "from its config; take another base model"
    )


def _candidates(model: PreTrainedModel) -> list[tuple[float, float | None]]:
    """All pairs of scale and cap to try. Those that the config suggests come first."""
    numbers = [float(number) for key in SCALES if (number := getattr(model.config, key, None))]
    scales = [scale for number in numbers for scale in (number, 1 / number)]
    softcaps = [float(cap) for key in SOFTCAPS if (cap := getattr(model.config, key, None))]
    return list(product([*scales, 1.0], [*softcaps, None]))
