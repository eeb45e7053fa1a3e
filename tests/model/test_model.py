"""What holds beside the numbers: empty steps, load counts, invariance, dummy weights."""

from __future__ import annotations

import json

import pytest
import torch
from helpers_checkpoints import ARCHITECTURES, make_checkpoint
from helpers_models import make_rank
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moeserve.model.kv_cache import KVCache, bytes_per_block
from moeserve.model.loader import open_weights
from moeserve.model.spec import read_spec
from moeserve_placement import Placement

TOKENS = torch.randint(0, 4096, (70,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.fixture(scope="module", params=ARCHITECTURES)
def checkpoint(request, tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), request.param)


@pytest.mark.parametrize("mode", ["cpu", "invariant"])
def test_empty_batch(checkpoint, mode):
    rank = make_rank(checkpoint, mode)
    assert rank.step().shape == (0, 4096)
    assert rank.load.snapshot().sum() == 0


def test_load_counts_are_exact(checkpoint):
    rank = make_rank(checkpoint)
    rank.step((TOKENS, 0, rank.blocks(len(TOKENS))))
    rank.step(([1], len(TOKENS), rank.blocks(len(TOKENS) + 1)), ([2], 0, rank.blocks(1)))
    counts = rank.load.snapshot()
    assert counts.sum(1).tolist() == [(len(TOKENS) + 2) * 2] * rank.spec.num_layers


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    length=st.integers(1, 70),
    cuts=st.sets(st.integers(1, 69), max_size=5),
    company=st.lists(st.integers(1, 20), max_size=3),
)
def test_invariant_logits(checkpoint, length, cuts, company):
    """Bit for bit the same: whole, in chunks, and chunk by chunk beside other requests."""
    rank = make_rank(checkpoint, "invariant")
    tokens = TOKENS[:length]
    whole = rank.step((tokens, 0, rank.blocks(length)))
    blocks, start = rank.blocks(length), 0
    for end in [*sorted(cut for cut in cuts if cut < length), length]:
        others = [(TOKENS[-n:], 0, rank.blocks(n)) for n in company]
        got = rank.step(*others, (tokens[start:end], start, blocks))[sum(company) :]
        for _, _, used in others:
            rank.free_blocks.extend(used)
        assert torch.equal(got, whole[start:end])
        start = end


def test_invariant_logits_under_any_placement(checkpoint):
    """Slots in another order, a free one among them: the same bits."""
    spec = read_spec(checkpoint)
    shuffled = (3, 1, None, 7, 0, 2, 6, 5, 4)
    placement = Placement(
        num_experts=spec.num_experts, layers=dict.fromkeys(spec.moe_layers, (shuffled,))
    )
    results = []
    for where in (None, placement):
        rank = make_rank(checkpoint, "invariant", placement=where)
        results.append(rank.step((TOKENS, 0, rank.blocks(len(TOKENS)))))
    assert torch.equal(*results)


def test_bytes_per_block(checkpoint):
    spec = read_spec(checkpoint)
    kv = KVCache.allocate(spec, 5, 4, torch.bfloat16)
    held = sum(tensor.nbytes for pair in kv.layers for tensor in pair)
    assert held == 5 * bytes_per_block(spec, 4, torch.bfloat16)


def test_dummy_weights_need_a_config_only(tmp_path, checkpoint):
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    rank = make_rank(tmp_path, dtype=torch.bfloat16, load_format="dummy")
    logits = rank.step((TOKENS, 0, rank.blocks(len(TOKENS))))
    assert logits.isfinite().all()
    assert logits.std() > 0


def test_dummy_experts_do_not_depend_on_who_asks(checkpoint):
    spec = read_spec(checkpoint)
    one, other = (
        open_weights(checkpoint, spec, torch.float32, load_format="dummy", seed=7) for _ in range(2)
    )
    one.expert(0, 3)
    one.take("lm_head.weight", (4096, 32))
    for first, second in zip(one.expert(1, 5), other.expert(1, 5), strict=True):
        assert torch.equal(first, second)
    reseeded = open_weights(checkpoint, spec, torch.float32, load_format="dummy", seed=8)
    assert not torch.equal(reseeded.expert(1, 5)[0], one.expert(1, 5)[0])
    assert not torch.equal(one.expert(0, 5)[0], one.expert(1, 5)[0])


def test_embedded_model_runs():
    from moeserve.config import embedded_model_path

    path = embedded_model_path()
    rank = make_rank(path, dtype=torch.bfloat16)
    assert rank.spec.eos_token_ids == (
        json.loads((path / "config.json").read_text())["eos_token_id"],
    )
    logits = rank.step((TOKENS, 0, rank.blocks(len(TOKENS))))
    assert logits.isfinite().all()
