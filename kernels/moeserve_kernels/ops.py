"""What each operation takes and returns, and the choice of an implementation.

Shapes: T tokens, R rows (tokens that reached this rank), H hidden size, I intermediate size of an
expert, E experts, S expert slots of this rank, k experts per token, B requests, d head size,
N x K a weight of N outputs and K inputs. T, R and B may be 0. Tensors are float32 or bfloat16, all
of one call alike where nothing else is said; sums run in float32. No operation changes its input,
``kv_write`` excepted.
"""

from __future__ import annotations

from typing import Protocol

import torch

MODES = ("cpu", "invariant", "reference", "triton")


class Ops(Protocol):
    """One implementation of every operation. Objects hold no state that a caller could see.

    description: a few words on how it computes, for people.
    """

    description: str

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``x [T, K] @ weight [N, K].T + bias [N]`` -> [T, N]."""
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """``x / sqrt(mean(x**2) + eps) * weight`` over the last dimension; any leading ones."""
        ...

    def rope(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotates ``x [T, heads, d]``, first half of d against second half (NeoX style).

        cos, sin: float32 [T, d / 2].
        """
        ...

    def kv_write(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Puts ``key, value [T, kv_heads, d]`` into the caches, in place.

        key_cache, value_cache: [num_blocks, block_size, kv_heads, d]; slot_mapping: int64 [T],
        block * block_size + offset of each token.
        """
        ...

    def paged_attention(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        block_table: torch.Tensor,
        query_lens: tuple[int, ...],
        seq_lens: tuple[int, ...],
        scale: float,
        sliding_window: int | None = None,
    ) -> torch.Tensor:
        """Causal attention of each request's newest tokens over its whole cached sequence.

        Args:
            query: [T, heads, d], request by request; heads is a multiple of kv_heads and head h
                reads kv head ``h // (heads // kv_heads)``.
            key_cache, value_cache: as in ``kv_write``, this step's tokens already written.
            block_table: int64 [B, max_blocks], blocks of each sequence in order.
            query_lens: tokens of each request in ``query``, at least 1; they are its last ones.
            seq_lens: tokens of each request in the cache.
            scale: factor of the scores.
            sliding_window: a token sees itself and the ``sliding_window - 1`` before it;
                None: all before it.

        Returns:
            [T, heads, d].
        """
        ...

    def route(
        self, router_logits: torch.Tensor, top_k: int, renormalize: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Softmax over all experts in float32, then the best k.

        Args:
            router_logits: [T, E].
            top_k: k.
            renormalize: whether the k weights are scaled to sum to 1.

        Returns:
            topk_weights float32 [T, k], falling; topk_ids int64 [T, k]. Among equal
            probabilities the lower id comes first.
        """
        ...

    def silu_mul(self, x: torch.Tensor) -> torch.Tensor:
        """``silu(x[:, :I]) * x[:, I:]`` for x [T, 2I] -> [T, I]."""
        ...

    def sigmoid(self, x: torch.Tensor) -> torch.Tensor:
        """``1 / (1 + exp(-x))`` elementwise."""
        ...

    def moe_ffn(
        self,
        hidden_states: torch.Tensor,
        w13: torch.Tensor,
        w2: torch.Tensor,
        slots: torch.Tensor,
        topk_weights: torch.Tensor,
    ) -> torch.Tensor:
        """Each row's weighted sum over those of its experts that this rank holds.

        Args:
            hidden_states: [R, H].
            w13: [S, 2I, H], gate rows first, then up rows.
            w2: [S, H, I].
            slots: int64 [R, k], -1 where the pair belongs to another rank.
            topk_weights: float32 [R, k].

        Returns:
            [R, H], ``sum_j topk_weights[r, j] * w2[s] @ silu_mul(w13[s] @ hidden_states[r])`` with
            ``s = slots[r, j]``, added up in the order of j; zero where no pair is here.
        """
        ...

    def moe_pairs(
        self, hidden_states: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, slots: torch.Tensor
    ) -> torch.Tensor:
        """As ``moe_ffn`` without weights and sum -> [R, k, H], zero where slots is -1."""
        ...

    def weighted_sum(self, pairs: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
        """``pairs [T, k, H]`` by ``topk_weights`` float32 [T, k] -> [T, H], in the order of k."""
        ...


def get_ops(mode: str) -> Ops:
    """The implementation named ``mode``, one of ``MODES``.

    Raises:
        ValueError: no such mode.
    """
    if mode == "cpu":
        from moeserve_kernels.cpu import CpuOps

        return CpuOps()
    if mode == "invariant":
        from moeserve_kernels.invariant import InvariantOps

        return InvariantOps()
    if mode == "reference":
        from moeserve_kernels.reference import ReferenceOps

        return ReferenceOps()
    if mode == "triton":
        from moeserve_kernels.triton_ops import TritonOps

        return TritonOps()
    raise ValueError(f"mode = {mode!r}: must be one of {', '.join(MODES)}")
