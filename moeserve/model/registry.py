"""Builds the model that a spec asks for."""

from __future__ import annotations

from typing import Protocol

import torch

from moeserve.model.batch import Batch
from moeserve.model.decoder import Decoder
from moeserve.model.decoder_weights import read_weights
from moeserve.model.kv_cache import KVCache
from moeserve.model.layers.moe import ExpertRuntime
from moeserve.model.spec import ModelSpec
from moeserve.model.weights import WeightSource
from moeserve_kernels import Ops


class Model(Protocol):
    """A decoder ready to run on this rank; it holds no state beyond its weights."""

    def forward(self, batch: Batch, kv: KVCache) -> torch.Tensor:
        """One step: writes the batch's keys and values to ``kv``, computes logits.

        An empty batch (T = 0) still meets the other ranks in every MoE layer.

        Returns:
            float32 [L, vocab], one row per ``batch.logits_indices``.
        """
        ...


def build(
    spec: ModelSpec,
    source: WeightSource,
    ops: Ops,
    experts: ExpertRuntime,
    *,
    max_model_len: int | None = None,
) -> Model:
    """The model of ``spec`` on this rank.

    Args:
        spec: of ``spec.read_spec``.
        source: of ``loader.open_weights``; gives all weights but the experts'.
        ops: of ``moeserve_kernels.get_ops``.
        experts: the rank's expert store, filled by ``loader.load_experts``, and what is around it.
        max_model_len: longest sequence in tokens; default: what the spec allows.
    """
    weights = read_weights(spec, source)
    return Decoder(spec, weights, ops, experts, max_model_len or spec.max_position_embeddings)
