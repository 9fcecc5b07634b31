"""Llama and its kin (Mistral, Qwen2, Qwen3) as few, large torch operations; no module tree."""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from serving.engines.torch_engine import rope
from serving.engines.torch_engine.architecture import LlamaShape
from serving.engines.torch_engine.linear import Linear
from serving.engines.torch_engine.runner import Batch, Chunk
from serving.engines.torch_engine.slots import KeyValueSlots
from serving.engines.torch_engine.units import Built

# oneDNN makes a kernel for each number of rows, at about a millisecond and 0.4 MB, and keeps it:
# numbers are rounded up. (Up to so many rows, to multiples of this.) Few rows cost about the same,
# since a step reads every weight whatever their number; more cost up to a fifth of the matrices'.
_ROW_STEPS = ((2, 1), (16, 4), (32, 8), (64, 16), (256, 32))
_ROW_STEP_ABOVE = 64
_ROWS_WARMED_UP = 64


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: Tensor
    qkv: Linear
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


class LlamaRunner:
    """The forward pass of one release, over slots of its own."""

    def __init__(
        self,
        shape: LlamaShape,
        built: Mapping[str, Built],
        slots: KeyValueSlots,
        *,
        num_slots: int,
        context: int,
        device: torch.device,
    ) -> None:
        self.num_slots = num_slots
        self.context = context
        self.vocab_size = shape.vocab_size
        self._shape = shape
        self._slots = slots
        self._device = device
        self._rotations = rope.rotations(shape.rope, shape.head_dim, context).to(device)[:, None]
        self._embedding = _tensor(built["embedding"])
        self._norm = _tensor(built["norm"])
        self._head = _matrix(built["head"])
        self._layers = [_assemble(shape, built, layer) for layer in range(shape.num_layers)]

    def warm_up(self) -> None:
        """Make the kernels of decoding batches, and of short prompts beside few of them."""
        if not self._head.is_packed:
            return
        layer = self._layers[0]
        matrices = (layer.qkv, layer.output, layer.gate_up, layer.down, self._head)
        by_kind = {(matrix.shape, matrix.bias is None): matrix for matrix in matrices}
        most = max(_ROWS_WARMED_UP, self.num_slots)
        for num_rows in sorted({_rounded(number) for number in range(1, most + 1)}):
            for matrix in by_kind.values():
                matrix(self._embedding.new_zeros(num_rows, matrix.shape[1]))

    def move(self, source: int, target: int, length: int) -> None:
        self._slots.move(source, target, length)

    def forward(self, batch: Batch) -> Tensor:
        rows = _Rows(batch, self._embedding.dtype, self._device, are_rounded=self._head.is_packed)
        x = F.embedding(rows.token_ids, self._embedding)
        rotation = self._rotations[rows.positions]
        for index, layer in enumerate(self._layers):
            x = self._layer(index, layer, x, rotation, rows)
        if rows.wanted is not None:
            x = x[rows.wanted]
        if not rows.num_wanted:
            return torch.empty(0, self.vocab_size, device=self._device)
        logits = self._head(self._normalise(x, self._norm))
        return logits[: rows.num_wanted].float()

    def _layer(
        self, index: int, layer: _Layer, x: Tensor, rotation: Tensor, rows: "_Rows"
    ) -> Tensor:
        shape = self._shape
        num_queries = shape.num_heads * shape.head_dim
        qkv = layer.qkv(self._normalise(x, layer.input_norm))
        # Queries and keys are rotated where they stand, so that keys and values leave as one block.
        heads = shape.num_heads + shape.num_kv_heads
        rotated = qkv[:, : heads * shape.head_dim].view(-1, heads, shape.head_dim)
        if layer.query_norm is not None and layer.key_norm is not None:
            of_queries, of_keys = rotated[:, : shape.num_heads], rotated[:, shape.num_heads :]
            of_queries.copy_(self._normalise(of_queries, layer.query_norm))
            of_keys.copy_(self._normalise(of_keys, layer.key_norm))
        _rotate(rotated, rotation)
        count = rows.count
        self._slots.write(
            index,
            rows.slots,
            rows.positions[:count],
            qkv[:count, num_queries:].view(count, 2, shape.num_kv_heads, shape.head_dim),
        )
        attended = self._attend(index, qkv[:, :num_queries], rows)
        x = x + layer.output(attended)
        gate, up = layer.gate_up(self._normalise(x, layer.mlp_norm)).chunk(2, dim=1)
        return x + layer.down(F.silu(gate).mul_(up))

    def _attend(self, index: int, queries: Tensor, rows: "_Rows") -> Tensor:
        parts = []
        if rows.num_decoding:
            parts.append(self._attend_decoding(index, queries[: rows.num_decoding], rows))
        first = rows.num_decoding
        for chunk, mask in rows.chunks:
            end = first + len(chunk.token_ids)
            parts.append(self._attend_chunk(index, queries[first:end], chunk, mask))
            first = end
        if first < len(queries):
            parts.append(queries[first:])
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend_decoding(self, index: int, queries: Tensor, rows: "_Rows") -> Tensor:
        shape, count = self._shape, rows.num_decoding
        keys, values = self._slots.read(index, 0, count, rows.longest)
        # The heads that share keys stand where SDPA has query positions: nothing is repeated.
        grouped = queries.view(count, shape.num_kv_heads, -1, shape.head_dim)
        if count > 1 and keys.dtype == torch.float32 and keys.device.type == "cpu":
            attended = _attend_by_products(grouped, keys, values, rows.mask)
        else:
            attended = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=rows.mask)
        return attended.reshape(count, -1)

    def _attend_chunk(
        self, index: int, queries: Tensor, chunk: Chunk, mask: Tensor | None
    ) -> Tensor:
        shape, count = self._shape, len(chunk.token_ids)
        keys, values = self._slots.read(index, chunk.slot, chunk.slot + 1, chunk.start + count)
        by_head = queries.view(1, count, shape.num_heads, shape.head_dim).transpose(1, 2)
        attended = F.scaled_dot_product_attention(
            by_head, keys, values, attn_mask=mask, is_causal=mask is None, enable_gqa=True
        )
        return attended.transpose(1, 2).reshape(count, -1)

    def _normalise(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self._shape.norm_eps)


class _Rows:
    """A batch as tensors: one row per token, decoding slots first, then padding where rounded."""

    def __init__(
        self, batch: Batch, dtype: torch.dtype, device: torch.device, *, are_rounded: bool
    ) -> None:
        self.num_decoding = len(batch.token_ids)
        token_ids = list(batch.token_ids)
        positions = list(batch.lengths)
        slots = list(range(self.num_decoding))
        wanted = list(slots)
        for chunk in batch.chunks:
            end = len(token_ids) + len(chunk.token_ids)
            if chunk.wants == "all":
                wanted.extend(range(len(token_ids), end))
            elif chunk.wants == "last":
                wanted.append(end - 1)
            token_ids.extend(chunk.token_ids)
            positions.extend(range(chunk.start, chunk.start + len(chunk.token_ids)))
            slots.extend([chunk.slot] * len(chunk.token_ids))
        self.count, self.num_wanted = len(token_ids), len(wanted)
        if are_rounded:
            token_ids.extend(_padding(self.count))
            positions.extend(_padding(self.count))
        self.token_ids = torch.tensor(token_ids, device=device)
        self.positions = torch.tensor(positions, device=device)
        self.slots = torch.tensor(slots, device=device)
        self.wanted: Tensor | None = None
        if self.num_wanted < self.count:
            wanted.extend(_padding(self.num_wanted) if are_rounded else [])
            self.wanted = torch.tensor(wanted, dtype=torch.long, device=device)
        self.longest = max(batch.lengths, default=0) + 1
        self.mask = _length_mask(batch.lengths, self.longest, dtype, device)
        self.chunks = [(chunk, _chunk_mask(chunk, device)) for chunk in batch.chunks]


def _rounded(num_rows: int) -> int:
    step = next((step for end, step in _ROW_STEPS if num_rows <= end), _ROW_STEP_ABOVE)
    return -(-num_rows // step) * step


def _padding(num_rows: int) -> list[int]:
    return [0] * (_rounded(num_rows) - num_rows)


def _length_mask(
    lengths: Seq[int], longest: int, dtype: torch.dtype, device: torch.device
) -> Tensor | None:
    """0 where a decoding row may look, else -inf, [rows, 1, 1, longest]; None where all are as
    long. Additive, since SDPA would turn a boolean one into that again in every layer."""
    if all(length == longest - 1 for length in lengths):
        return None
    ends = torch.tensor(lengths, device=device)
    is_beyond = torch.arange(longest, device=device) > ends[:, None]
    mask = torch.zeros(is_beyond.shape, dtype=dtype, device=device)
    return mask.masked_fill_(is_beyond, -torch.inf)[:, None, None]


def _attend_by_products(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None
) -> Tensor:
    """What SDPA computes. On a CPU it takes queries by blocks of more rows than there are here, and
    16 sequences of 7 M parameters half as long."""
    scaled = (queries * queries.shape[-1] ** -0.5).flatten(0, 1)
    scores = torch.bmm(scaled, keys.flatten(0, 1).transpose(1, 2))
    scores = scores.view(*queries.shape[:3], -1)
    if mask is not None:
        scores.add_(mask)
    return torch.bmm(scores.softmax(-1).flatten(0, 1), values.flatten(0, 1)).view_as(queries)


def _chunk_mask(chunk: Chunk, device: torch.device) -> Tensor | None:
    """True where a chunk's row may look, [rows, keys]; None for a prompt's beginning."""
    if chunk.start == 0:
        return None
    end = chunk.start + len(chunk.token_ids)
    keys = torch.arange(end, device=device)
    return keys <= torch.arange(chunk.start, end, device=device)[:, None]


def _rotate(pairs: Tensor, rotation: Tensor) -> None:
    """Turn [rows, heads, head dim] in place by [rows, 1, head dim / 2] complex numbers."""
    wide = pairs.float()
    turned = torch.view_as_complex(wide.view(*wide.shape[:-1], -1, 2)).mul_(rotation)
    if wide.dtype != pairs.dtype:
        pairs.copy_(torch.view_as_real(turned).flatten(2))


def _assemble(shape: LlamaShape, built: Mapping[str, Built], layer: int) -> _Layer:
    def norm(name: str) -> Tensor | None:
        return _tensor(built[f"{layer}.{name}"]) if shape.has_head_norms else None

    return _Layer(
        input_norm=_tensor(built[f"{layer}.input_norm"]),
        qkv=_matrix(built[f"{layer}.qkv"]),
        query_norm=norm("query_norm"),
        key_norm=norm("key_norm"),
        output=_matrix(built[f"{layer}.output"]),
        mlp_norm=_tensor(built[f"{layer}.mlp_norm"]),
        gate_up=_matrix(built[f"{layer}.gate_up"]),
        down=_matrix(built[f"{layer}.down"]),
    )


def _tensor(unit: Built) -> Tensor:
    assert isinstance(unit, Tensor)
    return unit


def _matrix(unit: Built) -> Linear:
    assert isinstance(unit, Linear)
    return unit
