"""Runs the model on a batch; owns the KV tensors."""

from __future__ import annotations

import torch

from moeserve.experts.load import LoadCounter
from moeserve.experts.store import ExpertStore
from moeserve.model.batch import Batch
from moeserve.model.decoder import Decoder
from moeserve.model.kv_cache import KVCache


class ModelRunner:
    """The model of this rank, its expert weights and its KV cache."""

    def __init__(
        self, model: Decoder, store: ExpertStore, load: LoadCounter, kv_cache: KVCache
    ) -> None:
        self._model = model
        self._store = store
        self._load = load
        self._kv_cache = kv_cache

    @torch.inference_mode()
    def forward(self, batch: Batch) -> torch.Tensor:
        """Logits, float32 [L, vocab_size], of the rows that the batch asks for.

        Writes the K and V of the batch's tokens into the cache; running the same batch again
        writes the same values, so a step can be repeated.
        """
        self._load.begin_step(batch.is_decode)
        return self._model.forward(batch, self._kv_cache)

    def check(self) -> None:
        """Raises RuntimeError if the expert slots do not hold what they should."""
        self._store.check()
