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
