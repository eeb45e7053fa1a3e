"""What makes a kernel's wrong reads and writes show; the GPU check uses the same."""

from moeserve_kernels.gpucheck.guards import (
    TOLERANCES,
    WILD_INT,
    Allocations,
    assert_close,
    assert_same_bits,
    inside_nan,
    poisoned_empty,
    relative_error,
    same_bits,
)

__all__ = [
    "TOLERANCES",
    "WILD_INT",
    "Allocations",
    "assert_close",
    "assert_same_bits",
    "inside_nan",
    "poisoned_empty",
    "relative_error",
    "same_bits",
]
