"""Attention of queries over a paged cache of keys and values.

A cache is [num_blocks, block_size, kv_heads, size]; token p of request b lies in slot
``p % block_size`` of block ``block_table[b, p // block_size]``. Query heads ``h * group ..`` share
kv head h, group = heads / kv_heads. float8_e4m3fn caches hold values divided by a scale.

A soft cap turns each scaled score s into ``cap * tanh(s / cap)``. A sink is one more score a head,
which takes its part of the probability and has no value. With a sliding window a token sees itself
and the ``window - 1`` before it.
"""

from __future__ import annotations

import torch

from moeserve_kernels import backend, check

MAX_HEAD_DIM = 256
_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_FP8 = torch.float8_e4m3fn


def attn_decode(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    *,
    max_seq_len: int,
    sliding_window: int | None = None,
    sinks: torch.Tensor | None = None,
    soft_cap: float | None = None,
    num_splits: int | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> torch.Tensor:
    """Return the attention of the last token of each request, [B, heads, d_v], dtype of query.

    query: [B, heads, d], float32, float16 or bfloat16; d and d_v up to 256.
    key_cache: [num_blocks, block_size, kv_heads, d], value_cache: [.., d_v]; dtype of query, or
        both float8_e4m3fn, where the values are ``stored * k_scale`` and ``stored * v_scale``.
        Blocks, slots and heads may have any stride.
    block_table: int32 [B, max_blocks]; entries past a sequence are not read.
    seq_lens: int32 [B], tokens in the cache, the query's own included; 0 gives zeros.
    scale: of the scores, usually d ** -0.5.
    max_seq_len: at least the largest of seq_lens; known on the host, so nothing waits for a GPU.
    sliding_window: at least 1. sinks: float32 [heads]. soft_cap: over 0.
    num_splits: programs among which a sequence is divided on a GPU; None: as many as fill it.

    Scores, softmax and sums are float32.

    Raises ValueError for a wrong shape or dtype, and for fp8 on a GPU that can not read it.

    Source: Kwon et al., "Efficient Memory Management for Large Language Model Serving with
    PagedAttention" (arXiv 2309.06180); splits as in Flash-Decoding; sinks as in gpt-oss.
    """
    _check(query, key_cache, value_cache, block_table, seq_lens, "B")
    _check_decode(query, block_table, seq_lens, key_cache, max_seq_len, num_splits)
    _check_options(query, key_cache, sliding_window, sinks, soft_cap, k_scale, v_scale)
    result: torch.Tensor = backend.implementation("attention", query).attn_decode(
        query,
        key_cache,
        value_cache,
        block_table,
        seq_lens,
        scale,
        max_seq_len=max_seq_len,
        sliding_window=sliding_window,
        sinks=sinks,
        soft_cap=soft_cap,
        num_splits=num_splits,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    return result


def attn_decode_splits(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    *,
    max_seq_len: int,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    num_splits: int | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``(partial, lse)``, the attention of each split, for ``merge``.

    Arguments are those of ``attn_decode``, but sinks, which count once: they go to ``merge``.
    partial: float32 [B, S, heads, d_v], the split's weighted mean of values.
    lse: float32 [B, S, heads], the natural log of the sum of exp(score).

    Every token a query sees is in one split; in which is up to the implementation. A split without
    tokens has lse -inf, and its partial may hold anything. Parts of one sequence in different
    caches can be merged too, after concatenation along S. (float64 in gives float64.)

    Raises ValueError for a wrong shape or dtype.
    """
    _check(query, key_cache, value_cache, block_table, seq_lens, "B")
    _check_decode(query, block_table, seq_lens, key_cache, max_seq_len, num_splits)
    _check_options(query, key_cache, sliding_window, None, soft_cap, k_scale, v_scale)
    family = backend.implementation("attention", query)
    result: tuple[torch.Tensor, torch.Tensor] = family.attn_decode_splits(
        query,
        key_cache,
        value_cache,
        block_table,
        seq_lens,
        scale,
        max_seq_len=max_seq_len,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        num_splits=num_splits,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    return result


def merge(
    partial: torch.Tensor,
    lse: torch.Tensor,
    *,
    sinks: torch.Tensor | None = None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return the mean of the splits weighted by exp(lse), [B, heads, d_v] of ``dtype``.

    partial: float32 [B, S, heads, d_v], not read where lse is -inf; lse: float32 [B, S, heads], the
    natural log. sinks: float32 [heads], see above. Without any token the result is zeros.

    Raises ValueError for a wrong shape or dtype.
    """
    check.dtype("partial", partial, torch.float32, torch.float64)
    check.shape("partial", partial, ("B", "S", "heads", "d_v"))
    check.rows_contiguous("partial", partial)
    check.dtype("lse", lse, partial.dtype)
    check.shape("lse", lse, partial.shape[:3])
    check.one_of("dtype", dtype, _FLOATS)
    check.same_device(partial=partial, lse=lse)
    check.at_least("splits", partial.shape[1], 1)
    _check_sinks(sinks, partial, partial.shape[2])
    family = backend.implementation("attention", partial)
    result: torch.Tensor = family.merge(partial, lse, sinks=sinks, dtype=dtype)
    return result


def attn_prefill(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_starts: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    *,
    max_query_len: int,
    sliding_window: int | None = None,
    sinks: torch.Tensor | None = None,
    soft_cap: float | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> torch.Tensor:
    """Return the causal attention of several tokens a request, [T, heads, d_v], dtype of query.

    query: [T, heads, d], the requests one after the other.
    query_starts: int32 [B + 1], the first row of each request, then the end. Its queries are the
        last ones of the ``seq_lens[b]`` tokens in the cache: what is before is an earlier chunk.
        Rows of the result past the end are not written.
    max_query_len: at least the most rows of a request; known on the host.
    Other arguments as in ``attn_decode``.

    Requests with one query are served too, but a long one is not split: for many of those
    ``attn_decode`` is faster.

    Raises ValueError for a wrong shape or dtype.

    Source: Dao, "FlashAttention-2" (arXiv 2307.08691).
    """
    _check(query, key_cache, value_cache, block_table, seq_lens, "T")
    check.dtype("query_starts", query_starts, torch.int32)
    check.shape("query_starts", query_starts, (seq_lens.shape[0] + 1,))
    check.rows_contiguous("query_starts", query_starts)
    check.same_device(query=query, query_starts=query_starts)
    check.at_least("max_query_len", max_query_len, 0)
    if check.in_debug_mode():
        query_lens = query_starts.diff()
        check.values("query_starts", query_starts, 0, query.shape[0] + 1)
        check.values("query_lens", query_lens, 0, max_query_len + 1)
        check.values("seq_lens - query_lens", seq_lens - query_lens, 0, 1 << 31)
        check_table(block_table, seq_lens, key_cache.shape[0], key_cache.shape[1])
    _check_options(query, key_cache, sliding_window, sinks, soft_cap, k_scale, v_scale)
    result: torch.Tensor = backend.implementation("attention", query).attn_prefill(
        query,
        key_cache,
        value_cache,
        block_table,
        query_starts,
        seq_lens,
        scale,
        max_query_len=max_query_len,
        sliding_window=sliding_window,
        sinks=sinks,
        soft_cap=soft_cap,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    return result


def _check(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    rows: str,
) -> None:
    check.dtype("query", query, *_FLOATS)
    check.shape("query", query, (rows, "heads", "d"))
    check.dtype("key_cache", key_cache, query.dtype, _FP8)
    check.shape("key_cache", key_cache, ("num_blocks", "block_size", "kv_heads", query.shape[2]))
    check.dtype("value_cache", value_cache, key_cache.dtype)
    check.shape("value_cache", value_cache, (*key_cache.shape[:3], "d_v"))
    check.dtype("block_table", block_table, torch.int32)
    check.shape("block_table", block_table, (seq_lens.shape[0], "max_blocks"))
    check.dtype("seq_lens", seq_lens, torch.int32)
    check.shape("seq_lens", seq_lens, ("B",))
    tensors = {
        "query": query,
        "key_cache": key_cache,
        "value_cache": value_cache,
        "block_table": block_table,
        "seq_lens": seq_lens,
    }
    for name, tensor in tensors.items():
        check.rows_contiguous(name, tensor)
    check.same_device(**tensors)
    heads, kv_heads = query.shape[1], key_cache.shape[2]
    if kv_heads == 0 or heads == 0 or heads % kv_heads != 0:
        raise ValueError(f"query: {heads} heads, must be a multiple of {kv_heads} kv heads")
    for name, size in (("d", query.shape[2]), ("d_v", value_cache.shape[3])):
        if not 1 <= size <= MAX_HEAD_DIM:
            raise ValueError(f"{name} = {size}: must be in 1..{MAX_HEAD_DIM}")


def check_table(
    block_table: torch.Tensor, seq_lens: torch.Tensor, num_blocks: int, block_size: int
) -> None:
    """In debug mode, raises ValueError for a length or a block in use that can not be."""
    check.values("seq_lens", seq_lens, 0, block_table.shape[1] * block_size + 1)
    if check.in_debug_mode():
        first = torch.arange(block_table.shape[1], device=seq_lens.device) * block_size
        in_use = first < seq_lens[:, None]
        check.values("block_table", block_table[in_use], 0, num_blocks)


def _check_decode(
    query: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    key_cache: torch.Tensor,
    max_seq_len: int,
    num_splits: int | None,
) -> None:
    check.shape("seq_lens", seq_lens, (query.shape[0],))
    check.at_least("max_seq_len", max_seq_len, 0)
    if num_splits is not None:
        check.at_least("num_splits", num_splits, 1)
    check.values("seq_lens", seq_lens, 0, max_seq_len + 1)
    check_table(block_table, seq_lens, key_cache.shape[0], key_cache.shape[1])


def _check_options(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    sliding_window: int | None,
    sinks: torch.Tensor | None,
    soft_cap: float | None,
    k_scale: float,
    v_scale: float,
) -> None:
    if sliding_window is not None:
        check.at_least("sliding_window", sliding_window, 1)
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft_cap = {soft_cap}: must be over 0")
    _check_sinks(sinks, query, query.shape[1])
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale != 1.0 and key_cache.dtype != _FP8:
            raise ValueError(f"{name} = {scale}: must be 1.0 unless the caches are float8_e4m3fn")


def _check_sinks(sinks: torch.Tensor | None, like: torch.Tensor, num_heads: int) -> None:
    if sinks is not None:
        check.dtype("sinks", sinks, torch.float32, torch.float64)
        check.shape("sinks", sinks, (num_heads,))
        check.rows_contiguous("sinks", sinks)
        check.same_device(query=like, sinks=sinks)
