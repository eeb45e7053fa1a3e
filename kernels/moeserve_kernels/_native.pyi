"""The compiled module; built from ``csrc/``. Addresses are of contiguous memory."""

def supported() -> bool: ...
def linear(
    x: int,
    weight: int,
    out: int,
    num_rows: int,
    num_outputs: int,
    depth: int,
    num_threads: int,
    /,
) -> None: ...
def attn_decode(
    query: int,
    key_cache: int,
    value_cache: int,
    block_table: int,
    seq_lens: int,
    out: int,
    num_requests: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    num_blocks: int,
    block_size: int,
    max_blocks: int,
    scale: float,
    sliding_window: int,
    num_threads: int,
    /,
) -> None: ...
def moe_ffn(
    hidden_states: int,
    w13: int,
    w2: int,
    slots: int,
    topk_weights: int,
    out: int,
    num_rows: int,
    top_k: int,
    num_slots: int,
    hidden_size: int,
    intermediate_size: int,
    num_threads: int,
    /,
) -> None: ...
