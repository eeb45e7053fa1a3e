"""The training model: a Qwen3-MoE decoder, laid out for fast training on a CPU.

Fused parameters (qkv, gate_up of all experts) make few large matmuls; export.py splits them
into the layout of published checkpoints.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .moe_function import apply_experts

ATTENTION_BLOCK = 256  # query rows per block: bounds the masked-out work and the score memory
NORM_EPSILON = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of the model; the defaults are those of the embedded model."""

    vocab_size: int = 4096
    hidden_size: int = 256
    num_layers: int = 8
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    num_experts: int = 16
    top_k: int = 2
    expert_size: int = 128
    max_length: int = 1024
    rope_theta: float = 10000.0

    @property
    def qkv_sizes(self) -> list[int]:
        """Rows of the query, key and value projections in the fused matrix."""
        kv_size = self.num_kv_heads * self.head_dim
        return [self.num_heads * self.head_dim, kv_size, kv_size]


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """Cross-entropy, load balance (1 when even) and squared log-partition of the router."""

    cross_entropy: Tensor
    balance: Tensor
    router_z: Tensor


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, computed in float32."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        """Return the normed and scaled x, in its dtype."""
        value = x.float()
        scale = torch.rsqrt(value.pow(2).mean(-1, keepdim=True) + NORM_EPSILON)
        return (value * scale * self.weight.float()).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x with rotary position embedding applied to its halves."""
    first, second = x.float().chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def causal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return causal attention in blocks of queries; each block skips the keys after it.

    All: [batch, num_heads, length, head_dim]; length is at most, or a multiple of, a block.
    """
    batch, num_heads, length, head_dim = query.shape
    query, key, value = (
        x.reshape(batch * num_heads, length, head_dim) for x in (query, key, value)
    )
    block = min(length, ATTENTION_BLOCK)
    outputs = []
    for start in range(0, length, block):
        end = start + block
        scores = torch.bmm(query[:, start:end], key[:, :end].transpose(1, 2)).float()
        visible = torch.ones(block, end, dtype=torch.bool).tril(start)
        scores = torch.where(visible, scores * head_dim**-0.5, -1e30)
        outputs.append(torch.bmm(scores.softmax(-1).to(query.dtype), value[:, :end]))
    return torch.cat(outputs, 1).view(batch, num_heads, length, head_dim)


class Attention(nn.Module):
    """Grouped-query attention with normed queries and keys."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.qkv = nn.Parameter(torch.empty(sum(shape.qkv_sizes), shape.hidden_size))
        self.out = nn.Parameter(torch.empty(shape.hidden_size, shape.qkv_sizes[0]))
        self.query_norm = RMSNorm(shape.head_dim)
        self.key_norm = RMSNorm(shape.head_dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return [batch, length, hidden_size]."""
        batch, length, _ = x.shape
        heads = (batch, length, -1, self.shape.head_dim)
        projected = F.linear(x, self.qkv)
        query, key, value = torch.split(projected, self.shape.qkv_sizes, -1)
        query = rotate(self.query_norm(query.view(heads)), cos, sin).transpose(1, 2)
        key = rotate(self.key_norm(key.view(heads)), cos, sin).transpose(1, 2)
        value = value.view(heads).transpose(1, 2)
        repeats = self.shape.num_heads // self.shape.num_kv_heads
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
        output = causal_attention(query, key, value)
        return F.linear(output.transpose(1, 2).reshape(batch, length, -1), self.out)


class Block(nn.Module):
    """Attention and experts, each behind a norm and around a residual."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        experts, hidden, size = shape.num_experts, shape.hidden_size, shape.expert_size
        self.shape = shape
        self.attention_norm = RMSNorm(hidden)
        self.expert_norm = RMSNorm(hidden)
        self.attention = Attention(shape)
        self.router = nn.Parameter(torch.empty(experts, hidden))
        self.gate_up = nn.Parameter(torch.empty(experts, 2 * size, hidden))
        self.down = nn.Parameter(torch.empty(experts, hidden, size))

    def route(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return expert ids, their weights (summing to one), balance loss and router z loss."""
        logits = F.linear(x.float(), self.router.float())
        probabilities = logits.softmax(-1)
        weights, topk_ids = probabilities.topk(self.shape.top_k, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        chosen = F.one_hot(topk_ids, self.shape.num_experts).sum(1).float()
        share = chosen.mean(0) / self.shape.top_k
        balance = self.shape.num_experts * (share * probabilities.mean(0)).sum()
        return topk_ids, weights, balance, logits.logsumexp(-1).pow(2).mean()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the hidden states, the balance loss and the router z loss."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        tokens = self.expert_norm(x).view(-1, self.shape.hidden_size)
        topk_ids, weights, balance, router_z = self.route(tokens)
        output = apply_experts(tokens, topk_ids, weights, self.gate_up, self.down)
        return x + output.view(x.shape), balance, router_z


@torch.compile(dynamic=False)
def cross_entropy(hidden_states: Tensor, embedding: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss of predicting the targets with the tied embedding."""
    return F.cross_entropy(F.linear(hidden_states, embedding).float(), targets)


class TrainingModel(nn.Module):
    """The decoder with its loss."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Parameter(torch.empty(shape.vocab_size, shape.hidden_size))
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.num_layers))
        self.norm = RMSNorm(shape.hidden_size)
        powers = torch.arange(0, shape.head_dim, 2).float() / shape.head_dim
        angles = torch.arange(shape.max_length).float()[:, None] / shape.rope_theta**powers
        self.register_buffer("cos", angles.cos()[None, :, None, :], persistent=False)
        self.register_buffer("sin", angles.sin()[None, :, None, :], persistent=False)
        self.initialize()

    def initialize(self) -> None:
        """Draw the matrices; those that write to the residual stream are smaller."""
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                is_output = name.endswith(("attention.out", ".down"))
                scale = 1 / math.sqrt(2 * self.shape.num_layers) if is_output else 1.0
                nn.init.normal_(parameter, 0.0, 0.02 * scale)

    def compile_blocks(self) -> None:
        """Compile the forward pass that all blocks share."""
        compiled = torch.compile(Block.forward, dynamic=False)
        for block in self.blocks:
            block.forward = compiled.__get__(block)

    def forward(self, token_ids: Tensor) -> Losses:
        """Return the losses of [batch, length + 1] token ids."""
        inputs, targets = token_ids[:, :-1], token_ids[:, 1:]
        cos, sin = self.cos[:, : inputs.shape[1]], self.sin[:, : inputs.shape[1]]
        x = self.embedding[inputs]
        balances, router_zs = [], []
        for block in self.blocks:
            x, balance, router_z = block(x, cos, sin)
            balances.append(balance)
            router_zs.append(router_z)
        hidden_states = self.norm(x).view(-1, self.shape.hidden_size)
        return Losses(
            cross_entropy=cross_entropy(hidden_states, self.embedding, targets.reshape(-1)),
            balance=torch.stack(balances).mean(),
            router_z=torch.stack(router_zs).mean(),
        )
