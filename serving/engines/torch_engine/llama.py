"""Runs Llama and similar networks (Mistral, Qwen2, Qwen3) as a few large torch operations, without
torch modules."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from serving.engines.torch_engine.architecture import LlamaShape, rotations
from serving.engines.torch_engine.linear import Linear
from serving.engines.torch_engine.rows import Rows, Span, is_parallel_worthwhile
from serving.engines.torch_engine.runner import Batch, Chunk
from serving.engines.torch_engine.slots import KeyValueSlots, KvCacheSize


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
        self.slots = slots
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
        rows = Rows(batch, self.slots[0], is_padded=self._head.is_packed)
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
            self.slots[index].write_rows(rows.row_indices, by_head[: rows.num_decoding])
        for chunk, its_rows, _ in rows.chunks:
            self.slots[index].write_run(chunk.slot, chunk.start, by_head[its_rows])

    def _attend(self, index: int, queries: Tensor, rows: Rows) -> Tensor:
        parts = [self._attend_span(index, queries[span.rows], span) for span in rows.spans]
        for chunk, its_rows, mask in rows.chunks:
            parts.append(self._attend_chunk(index, queries[its_rows], chunk, mask))
        if rows.count < len(queries):  # padding
            parts.append(queries[rows.count :])
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend_span(self, index: int, queries: Tensor, span: Span) -> Tensor:
        shape, count = self._shape, span.end - span.first
        keys, values = self.slots[index].read(span.first, span.end, span.length)
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
        keys, values = self.slots[index].read(chunk.slot, chunk.slot + 1, chunk.start + count)
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
