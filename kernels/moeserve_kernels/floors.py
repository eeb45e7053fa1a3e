"""The least time that an operation can take on a chip: bytes over bandwidth, or work over rate.

Every tensor is counted once where it must be read or written; launches are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """What a chip reaches: bytes a second of a copy, and operations a second of large products."""

    bytes_per_s: float
    flops_per_s: float


H200 = Limits(bytes_per_s=4.3e12, flops_per_s=790e12)  # measured; flops in bfloat16


@dataclass(frozen=True)
class Floor:
    """Bytes that must be moved and operations that must be done."""

    num_bytes: float
    flops: float

    def microseconds(self, limits: Limits) -> float:
        """The least time: both overlap, so the longer one counts."""
        return 1e6 * max(self.num_bytes / limits.bytes_per_s, self.flops / limits.flops_per_s)

    def bound(self, limits: Limits) -> str:
        """What limits it: "memory" or "compute"."""
        memory = self.num_bytes / limits.bytes_per_s >= self.flops / limits.flops_per_s
        return "memory" if memory else "compute"


@dataclass(frozen=True)
class MoeShape:
    """An expert FFN on one device: ``local_experts`` of ``num_experts``, of I intermediate columns.

    bytes_per_weight: 2 for bfloat16, 1 for fp8 and int8, 0.53 for int4 with its scales.
    """

    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    local_experts: int
    bytes_per_weight: float = 2.0

    def experts_hit(self, num_tokens: int) -> float:
        """Local experts that get a token, on average, when experts are chosen evenly."""
        missed = (1 - self.top_k / self.num_experts) ** num_tokens
        return self.local_experts * (1 - missed)

    def pairs(self, num_tokens: int) -> float:
        """(token, expert) pairs that are computed here, on average."""
        return num_tokens * self.top_k * self.local_experts / self.num_experts


def moe_ffn(shape: MoeShape, num_tokens: int, *, activation_bytes: float = 2.0) -> Floor:
    """Both products, the activation and the sum over a token's pairs.

    num_tokens: of all ranks whose pairs may be computed here. Weights of the experts that are hit
    are read once; rows of x are read once (a token without a pair here is not), h and the pairs'
    results are written and read, the output is written.
    """
    pairs = shape.pairs(num_tokens)
    matrix = shape.hidden_size * shape.intermediate_size
    weights = shape.experts_hit(num_tokens) * 3 * matrix * shape.bytes_per_weight
    ends = 2 * min(num_tokens, pairs) * shape.hidden_size  # x and the output
    inner = 2 * pairs * (shape.intermediate_size + shape.hidden_size)
    return Floor(weights + activation_bytes * (ends + inner), 6 * pairs * matrix)


def break_even_rows(limits: Limits, bytes_per_weight: float = 2.0) -> float:
    """Rows an expert above which arithmetic, not reading its weights, takes the time."""
    return limits.flops_per_s * bytes_per_weight / (2 * limits.bytes_per_s)


def attn_decode(
    batch: int,
    seq_len: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    cache_bytes: float = 2.0,
) -> Floor:
    """Paged decode attention of one layer: keys and values once, queries and outputs once."""
    cache = batch * seq_len * num_kv_heads * head_dim * 2 * cache_bytes
    ends = batch * num_heads * head_dim * 2 * 2
    return Floor(cache + ends, 4 * batch * seq_len * num_heads * head_dim)


def mla_decode(
    batch: int, seq_len: int, num_heads: int, *, value_dim: int = 512, rope_dim: int = 64
) -> Floor:
    """Absorbed MLA decode: a latent of value_dim + rope_dim a token, shared by all heads."""
    width = value_dim + rope_dim
    num_bytes = batch * seq_len * width * 2 + batch * num_heads * (width + value_dim) * 2
    return Floor(num_bytes, 2 * batch * seq_len * num_heads * (width + value_dim))


def attn_prefill(
    num_queries: int, seq_len: int, num_heads: int, num_kv_heads: int, head_dim: int
) -> Floor:
    """Causal attention of one request: its last ``num_queries`` of ``seq_len`` tokens."""
    first = seq_len - num_queries + 1  # tokens that the first query sees
    visible = num_queries * (first + seq_len) / 2
    cache = seq_len * num_kv_heads * head_dim * 2 * 2
    ends = num_queries * num_heads * head_dim * 2 * 2
    return Floor(cache + ends, 4 * visible * num_heads * head_dim)
