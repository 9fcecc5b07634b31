"""Runs Llama and similar networks (Mistral, Qwen2, Qwen3) as a few large torch operations, without
torch modules.

Before a parallel operation, the sleeping threads must be woken. This takes 10 to 150 µs. It takes
longer if other programs use the cores, and if threads spin for a shorter time before they sleep
(`GOMP_SPINCOUNT`). A decoding step has hundreds of operations that take less time than this on one
thread. So `Rows` decides which operations run on several threads.
"""

import functools
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from serving.engines.torch_engine.slots import Batch, Chunk, KeyValueSlots, KvCacheSize

_log = logging.getLogger(__name__)

# The number of rows for which oneDNN chooses the layout. The layout serves any other number too.
_PACKED_FOR_ROWS = 16

# oneDNN creates a kernel for each number of rows and keeps it (about 1 ms and 0.4 MB each). So
# the number of rows is padded to one of a few numbers. (n, step): up to n rows, it is padded to a
# multiple of step. Padding a few rows costs almost nothing, because a step reads every weight
# anyway. Padding more rows costs up to a fifth of the time of the matrix products.
_ROW_STEPS = ((2, 1), (16, 4), (32, 8), (64, 16), (256, 32))
_ROW_STEP_ABOVE = 64

# One more attention operation takes as long as reading this many more bytes of keys and values:
# about 40 µs.
_SPAN_BYTES = 1 << 19

# Elementwise operations on at least this number of rows are faster on several threads.
_PARALLEL_ROWS = 256
# Attention that reads or multiplies this much takes about 0.1 ms on one thread.
_PARALLEL_READ_BYTES = 1 << 18
_PARALLEL_MULTIPLICATIONS = 1 << 22


class Linear:
    """`x @ weight.T + bias`.

    The weight is packed once into oneDNN's blocked layout, and the plain weight is freed. A
    decoding step is limited by the time to read weights. With the packed layout it takes at most
    half the time that it takes with `F.linear` and the plain layout.

    The product calls private operators of torch. If a version of torch does not have them, or if
    they take other arguments there, matrices keep the plain layout, which is slower.
    """

    __slots__ = ("__weakref__", "_weight", "bias", "is_packed")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """`weight` is [out, in], `bias` is [out]. Both must have the final dtype."""
        self.bias = bias
        self.is_packed = _can_pack(weight.dtype)
        if self.is_packed:
            weight = _pack(weight)
        self._weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        """`x` is [rows, in]. Returns [rows, out]."""
        if self.is_packed:
            return _multiply_packed(x, self._weight, self.bias)
        return F.linear(x, self._weight, self.bias)


@functools.cache
def _can_pack(dtype: torch.dtype) -> bool:
    is_available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if dtype not in (torch.float32, torch.bfloat16) or not is_available:
        return False
    try:
        if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return False
        identity = torch.eye(_PACKED_FOR_ROWS, dtype=dtype)
        return torch.equal(_multiply_packed(identity, _pack(identity), None), identity)
    except (AttributeError, RuntimeError, TypeError) as error:
        _log.warning(
            "torch %s does not multiply packed %s matrices (%s); answers take longer",
            torch.__version__,
            dtype,
            error,
        )
        return False


def _pack(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS)
    return packed


def _multiply_packed(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return y


@dataclass(frozen=True, kw_only=True, slots=True)
class LlamaShape:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context: int
    norm_eps: float
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    has_head_norms: bool
    """Whether queries and keys are normalised in each head (Qwen3)."""
    rope: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Adjacent slots whose decoding rows attend in one operation. All of them read `length` tokens,
    one more than the longest of their sequences held."""

    rows: slice
    first: int
    end: int
    length: int
    places: Tensor | None
    """The slots of the rows, counted from `first`; None if the span has a row for every slot."""
    is_parallel: bool
    """Whether this attention runs on several threads."""
    mask: Tensor | None
    """[slots, 1, 1, length]: 0 where a row may look, else -inf; None if all rows may look
    everywhere. It is additive, because SDPA would convert a boolean mask again in every layer."""
    score_mask: Tensor | None
    """[slots * KV heads, 1, length] or [1, 1, 1]: the same as `mask`, to be added to the scores of
    each KV head. None if SDPA computes this attention."""


class Rows:
    """One row for each token. Decoding slots come first, then chunks, then padding if
    `is_padded`."""

    def __init__(self, batch: Batch, slots: KeyValueSlots, *, is_padded: bool) -> None:
        """`slots` are those of any layer."""
        self.row_indices = slots.row_indices(batch.slots, batch.lengths)
        """Where the decoding rows write their keys and values."""
        self.num_decoding = len(batch.token_ids)
        token_ids = list(batch.token_ids)
        positions = list(batch.lengths)
        wanted = list(range(self.num_decoding))
        self.chunks: list[tuple[Chunk, slice, Tensor | None]] = []
        """Each chunk with its rows, and the mask of its attention."""
        for chunk in batch.chunks:
            first, end = len(token_ids), len(token_ids) + len(chunk.token_ids)
            self.chunks.append((chunk, slice(first, end), _chunk_mask(chunk)))
            wanted.extend(range(end - chunk.num_wanted, end))
            token_ids.extend(chunk.token_ids)
            positions.extend(range(chunk.start, chunk.start + len(chunk.token_ids)))
        self.count, self.num_wanted = len(token_ids), len(wanted)
        self.is_parallel = self.count >= _PARALLEL_ROWS
        """Whether elementwise operations on these rows run on several threads."""
        if is_padded:
            token_ids.extend(_padding(self.count))
            positions.extend(_padding(self.count))
        self.token_ids = torch.tensor(token_ids)
        self.positions = torch.tensor(positions)
        self.wanted: Tensor | None = None
        if self.num_wanted < self.count:
            wanted.extend(_padding(self.num_wanted) if is_padded else [])
            self.wanted = torch.tensor(wanted, dtype=torch.long)
        span_tokens = _SPAN_BYTES // slots.shape.token_bytes(slots.dtype)
        self.spans = [
            _span(batch, rows, slots) for rows in adjacent(batch.slots, batch.lengths, span_tokens)
        ]


def is_parallel_worthwhile(*, read_bytes: int = 0, multiplications: int = 0) -> bool:
    """Whether attention of this size is faster on several threads."""
    return read_bytes > _PARALLEL_READ_BYTES or multiplications > _PARALLEL_MULTIPLICATIONS


def padded_count(num_rows: int) -> int:
    """The number of rows after padding."""
    step = next((step for end, step in _ROW_STEPS if num_rows <= end), _ROW_STEP_ABOVE)
    return -(-num_rows // step) * step


def _padding(num_rows: int) -> list[int]:
    return [0] * (padded_count(num_rows) - num_rows)


def adjacent(slots: Sequence[int], lengths: Sequence[int], span_tokens: int) -> list[slice]:
    """Divide the rows of ascending `slots` into runs. Each run attends in one operation.

    A run reads all slots from its first to its last one, each up to the longest sequence. This
    reads too much if slots are missing between them or if lengths differ. A new run costs as much
    as reading `span_tokens` tokens, and begins where this is less.
    """
    runs: list[slice] = []
    begin = longest = 0
    for row, (slot, length) in enumerate(zip(slots, lengths, strict=True)):
        if row:
            width = slots[row - 1] - slots[begin] + 1
            joined = (slot - slots[begin] + 1) * max(longest, length)
            if joined > width * longest + length + span_tokens:
                runs.append(slice(begin, row))
                begin, longest = row, 0
        longest = max(longest, length)
    return [*runs, slice(begin, len(slots))] if slots else []


def _span(batch: Batch, rows: slice, slots: KeyValueSlots) -> Span:
    numbers, lengths = batch.slots[rows], batch.lengths[rows]
    first, end = numbers[0], numbers[-1] + 1
    length = max(lengths) + 1
    places = [number - first for number in numbers]
    is_whole = len(numbers) == end - first
    mask = None
    if any(each != length - 1 for each in lengths):
        # The result for a slot between them is not used, but it must not be NaN. So such a slot
        # looks at all columns.
        ends = [length] * (end - first)
        for place, each in zip(places, lengths, strict=True):
            ends[place] = each
        is_beyond = torch.arange(length) > torch.tensor(ends)[:, None]
        mask = torch.zeros(is_beyond.shape, dtype=slots.dtype)
        mask = mask.masked_fill_(is_beyond, -torch.inf)[:, None, None]
    score_mask = None
    if slots.dtype == torch.float32:
        # In bfloat16, oneDNN would create a kernel for each length.
        score_mask = torch.zeros(1, 1, 1) if mask is None else mask[:, 0]
        if mask is not None:
            score_mask = score_mask.repeat_interleave(slots.shape.num_heads, dim=0)
    return Span(
        rows=rows,
        first=first,
        end=end,
        length=length,
        places=None if is_whole else torch.tensor(places),
        is_parallel=is_parallel_worthwhile(
            read_bytes=(end - first) * length * slots.shape.token_bytes(slots.dtype)
        ),
        mask=mask,
        score_mask=score_mask,
    )


def _chunk_mask(chunk: Chunk) -> Tensor | None:
    """[rows, keys]: True where a row of the chunk may look; None if the chunk begins its
    sequence."""
    if chunk.start == 0:
        return None
    end = chunk.start + len(chunk.token_ids)
    return torch.arange(end) <= torch.arange(chunk.start, end)[:, None]


@dataclass(frozen=True, slots=True)
class _Layer:
    """The fields are the names of the layer's units."""

    input_norm: Tensor
    qkv: Linear
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


class LlamaRunner:
    """The network of one release, with the slots of each of its layers."""

    def __init__(
        self,
        shape: LlamaShape,
        built: Mapping[str, Any],
        slots: Sequence[KeyValueSlots],
        cache_size: KvCacheSize,
    ) -> None:
        self.cache_size = cache_size
        self.vocab_size = shape.vocab_size
        self._shape = shape
        self.layer_slots = slots
        self._rotations = rotations(shape.rope, shape.head_dim, cache_size.context)[:, None]
        self._norm_eps = torch.tensor(shape.norm_eps)
        self._attention_scale = shape.head_dim**-0.5
        self._embedding: Tensor = built["embedding"]
        self._norm: Tensor = built["norm"]
        self._head: Linear = built["head"]
        self._layers: list[_Layer] = []
        for layer in range(shape.num_layers):
            names = _Layer.__dataclass_fields__
            units: dict[str, Any] = {name: built.get(f"{layer}.{name}") for name in names}
            self._layers.append(_Layer(**units))

    def forward(self, batch: Batch) -> Tensor:
        rows = Rows(batch, self.layer_slots[0], is_padded=self._head.is_packed)
        self._num_threads = torch.get_num_threads()
        """For matrix products and large attention. Elementwise operations use
        `_num_elementwise_threads`."""
        self._num_elementwise_threads = self._num_threads if rows.is_parallel else 1
        with _use_threads(self._num_elementwise_threads):
            x = F.embedding(rows.token_ids, self._embedding)
            rotation = self._rotations[rows.positions]
            for index, layer in enumerate(self._layers):
                x = self._layer(index, layer, x, rotation, rows)
            if rows.wanted is not None:
                x = x[rows.wanted]
            if not rows.num_wanted:
                return torch.empty(0, self.vocab_size)
            logits = self._multiply(self._head, self._normalise(x, self._norm))
            return logits[: rows.num_wanted].float()

    def _multiply(self, matrix: Linear, x: Tensor) -> Tensor:
        torch.set_num_threads(self._num_threads)
        y = matrix(x)
        torch.set_num_threads(self._num_elementwise_threads)
        return y

    def _layer(self, index: int, layer: _Layer, x: Tensor, rotation: Tensor, rows: Rows) -> Tensor:
        shape = self._shape
        num_queries = shape.num_heads * shape.head_dim
        qkv = self._multiply(layer.qkv, self._normalise(x, layer.input_norm))
        # Queries and keys are rotated in place, so keys and values stay one contiguous block.
        heads = shape.num_heads + shape.num_kv_heads
        rotated = qkv[:, : heads * shape.head_dim].view(-1, heads, shape.head_dim)
        if layer.query_norm is not None and layer.key_norm is not None:
            of_queries, of_keys = rotated[:, : shape.num_heads], rotated[:, shape.num_heads :]
            of_queries.copy_(self._normalise(of_queries, layer.query_norm))
            of_keys.copy_(self._normalise(of_keys, layer.key_norm))
        _rotate(rotated, rotation)
        self._write(index, qkv[: rows.count, num_queries:], rows)
        attended = self._attend(index, qkv[:, :num_queries], rows)
        x = self._multiply(layer.output, attended).add_(x)
        gate, up = self._multiply(layer.gate_up, self._normalise(x, layer.mlp_norm)).chunk(2, dim=1)
        return self._multiply(layer.down, F.silu(gate).mul_(up)).add_(x)

    def _write(self, index: int, keys_values: Tensor, rows: Rows) -> None:
        by_head = keys_values.view(-1, 2, self._shape.num_kv_heads, self._shape.head_dim)
        if rows.num_decoding:
            self.layer_slots[index].write_rows(rows.row_indices, by_head[: rows.num_decoding])
        for chunk, its_rows, _ in rows.chunks:
            self.layer_slots[index].write_run(chunk.slot, chunk.start, by_head[its_rows])

    def _attend(self, index: int, queries: Tensor, rows: Rows) -> Tensor:
        parts = [self._attend_span(index, queries[span.rows], span) for span in rows.spans]
        for chunk, its_rows, mask in rows.chunks:
            parts.append(self._attend_chunk(index, queries[its_rows], chunk, mask))
        if rows.count < len(queries):  # padding
            parts.append(queries[rows.count :])
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend_span(self, index: int, queries: Tensor, span: Span) -> Tensor:
        shape, count = self._shape, span.end - span.first
        keys, values = self.layer_slots[index].read(span.first, span.end, span.length)
        if span.places is not None:
            queries = queries.new_zeros(count, queries.shape[1]).index_copy_(
                0, span.places, queries
            )
        # For SDPA, the query heads that share a key head look like query positions. So keys and
        # values need not be repeated.
        grouped = queries.view(count, shape.num_kv_heads, -1, shape.head_dim)
        with _use_threads(self._num_threads if span.is_parallel else 1):
            if span.score_mask is not None:
                # As SDPA does, with fewer operations. Besides, SDPA on a CPU processes blocks of
                # more query rows than there are here.
                scores = torch.baddbmm(
                    span.score_mask,
                    grouped.flatten(0, 1),
                    keys.flatten(0, 1).transpose(1, 2),
                    alpha=self._attention_scale,
                )
                attended = torch.bmm(scores.softmax(-1), values.flatten(0, 1))
            else:
                attended = F.scaled_dot_product_attention(
                    grouped, keys, values, attn_mask=span.mask
                )
        attended = attended.reshape(count, -1)
        return attended if span.places is None else attended[span.places]

    def _attend_chunk(
        self, index: int, queries: Tensor, chunk: Chunk, mask: Tensor | None
    ) -> Tensor:
        shape, count = self._shape, len(chunk.token_ids)
        keys, values = self.layer_slots[index].read(chunk.slot, chunk.slot + 1, chunk.start + count)
        by_head = queries.view(1, count, shape.num_heads, shape.head_dim).transpose(1, 2)
        is_parallel = is_parallel_worthwhile(
            multiplications=2 * queries.numel() * (chunk.start + count)
        )
        with _use_threads(self._num_threads if is_parallel else 1):
            attended = F.scaled_dot_product_attention(
                by_head, keys, values, attn_mask=mask, is_causal=mask is None, enable_gqa=True
            )
        return attended.transpose(1, 2).reshape(count, -1)

    def _normalise(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMS norm (arXiv:1910.07467), computed in float32. `weight` is float32. It has fewer
        operations than `F.rms_norm`, which takes up to twice as long for few rows on a CPU."""
        wide = x.float()
        norms: Tensor = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scales = torch.addcmul(self._norm_eps, norms, norms, value=1 / x.shape[-1]).rsqrt_()
        return (wide * scales).mul_(weight).to(x.dtype)


@contextmanager
def _use_threads(num_threads: int) -> Iterator[None]:
    """In the `with` block, operations of the calling thread run on `num_threads` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _rotate(pairs: Tensor, rotation: Tensor) -> None:
    """Rotate the pairs of `pairs` [rows, heads, head dim] in place, with the complex numbers
    `rotation` [rows, 1, head dim / 2]."""
    wide = pairs.float()
    wide.view(torch.complex64).mul_(rotation)
    if wide.dtype != pairs.dtype:
        pairs.copy_(wide)


def rotations(parameters: dict[str, Any], head_dim: int, positions: int) -> Tensor:
    """complex64 [positions, head_dim / 2]: the factor for each pair of a head at each position."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies: Tensor = 1.0 / (parameters["rope_theta"] ** exponents)
    if parameters["rope_type"] == "linear":  # position interpolation, arXiv:2306.15595
        frequencies /= parameters["factor"]
    elif parameters["rope_type"] == "llama3":
        frequencies = _scaled_as_in_llama3(frequencies, parameters)
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies)
    return torch.polar(torch.ones_like(angles), angles)


def _scaled_as_in_llama3(frequencies: Tensor, parameters: dict[str, Any]) -> Tensor:
    """Divides low frequencies by `factor`, keeps high ones, and blends those between."""
    low, high = float(parameters["low_freq_factor"]), float(parameters["high_freq_factor"])
    turns = frequencies * (parameters["original_max_position_embeddings"] / (2 * math.pi))
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    blended: Tensor = kept * frequencies + (1.0 - kept) * frequencies / parameters["factor"]
    return blended
