"""A whole attention layer of Qwen3-MoE, composed of the operations, against transformers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import (
    Qwen3MoeAttention,
    Qwen3MoeRotaryEmbedding,
)

from moeserve_kernels import backend
from moeserve_kernels.operations.attention import attn_decode, attn_prefill
from moeserve_kernels.operations.kv_cache import kv_write
from moeserve_kernels.operations.norm import rms_norm

_CONFIG = Qwen3MoeConfig(
    hidden_size=96,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=32,
    rms_norm_eps=1e-6,
    attn_implementation="eager",
)
_BLOCK = 8
_TOKENS = 37


@dataclass
class Layer:
    """The module's weights, run over a paged cache whose blocks are in reverse order."""

    module: Qwen3MoeAttention
    caches: tuple[torch.Tensor, torch.Tensor]
    cos: torch.Tensor
    sin: torch.Tensor
    length: int = 0

    def forward(self, hidden_states: torch.Tensor, *, decode: bool) -> torch.Tensor:
        """The next tokens [T, H] -> [T, H]; decode: each call has one token."""
        num_tokens = hidden_states.shape[0]
        query, key, value = (
            projection(hidden_states).unflatten(1, (-1, _CONFIG.head_dim))
            for projection in (self.module.q_proj, self.module.k_proj, self.module.v_proj)
        )
        query = rms_norm(query, self.module.q_norm.weight, _CONFIG.rms_norm_eps)
        key = rms_norm(key, self.module.k_norm.weight, _CONFIG.rms_norm_eps)
        positions = torch.arange(self.length, self.length + num_tokens)
        table = torch.arange(self.caches[0].shape[0]).flip(0).to(torch.int32)
        slots = table[positions // _BLOCK] * _BLOCK + positions % _BLOCK
        angles = {"cos": self.cos[positions], "sin": self.sin[positions]}
        rotated = kv_write(key, value, *self.caches, slots.long(), query=query, **angles)
        assert rotated is not None
        self.length += num_tokens
        inputs = (rotated, *self.caches, table[None])
        lengths = torch.tensor([self.length], dtype=torch.int32)
        if decode:
            out = attn_decode(*inputs, lengths, self.module.scaling, max_seq_len=_TOKENS)
        else:
            starts = torch.tensor([0, num_tokens], dtype=torch.int32)
            scale = self.module.scaling
            out = attn_prefill(*inputs, starts, lengths, scale, max_query_len=num_tokens)
        result: torch.Tensor = self.module.o_proj(out.flatten(1))
        return result


@pytest.fixture(params=["cpu", "triton-interpret", "reference"])
def layer_and_truth(
    request: pytest.FixtureRequest,
) -> Iterator[tuple[Layer, torch.Tensor, torch.Tensor]]:
    """The layer with an empty cache, hidden states, and what transformers makes of them."""
    torch.manual_seed(4)
    module = Qwen3MoeAttention(_CONFIG, 0).eval()
    for norm in (module.q_norm, module.k_norm):
        torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    hidden_states = torch.randn(_TOKENS, _CONFIG.hidden_size)
    cos, sin = Qwen3MoeRotaryEmbedding(_CONFIG)(hidden_states, torch.arange(_TOKENS)[None])
    mask = torch.full((_TOKENS, _TOKENS), -torch.inf).triu(1)[None, None]
    half = _CONFIG.head_dim // 2
    shape = (-(-_TOKENS // _BLOCK), _BLOCK, _CONFIG.num_key_value_heads, _CONFIG.head_dim)
    with torch.inference_mode():
        truth = module(hidden_states[None], (cos, sin), mask)[0][0]
        caches = (torch.full(shape, torch.nan), torch.full(shape, torch.nan))
        layer = Layer(module, caches, cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous())
        with backend.forced(request.param):
            yield layer, hidden_states, truth


def assert_equal(out: torch.Tensor, truth: torch.Tensor) -> None:
    torch.testing.assert_close(out, truth, rtol=0, atol=1e-4)
    assert truth.abs().max() > 0.1


def test_a_whole_prompt(layer_and_truth: tuple[Layer, torch.Tensor, torch.Tensor]) -> None:
    layer, hidden_states, truth = layer_and_truth
    assert_equal(layer.forward(hidden_states, decode=False), truth)


def test_a_prompt_in_chunks(layer_and_truth: tuple[Layer, torch.Tensor, torch.Tensor]) -> None:
    layer, hidden_states, truth = layer_and_truth
    parts = [layer.forward(one, decode=False) for one in hidden_states.split([16, 1, 13, 7])]
    assert_equal(torch.cat(parts), truth)


def test_token_by_token(layer_and_truth: tuple[Layer, torch.Tensor, torch.Tensor]) -> None:
    layer, hidden_states, truth = layer_and_truth
    # Into the second block; in the interpreter each token takes half a second.
    parts = [layer.forward(one, decode=True) for one in hidden_states[: _BLOCK + 3].split(1)]
    assert_equal(torch.cat(parts), truth[: _BLOCK + 3])
