"""Expert weights in the formats the grouped products take.

Values are ``data * scale``, symmetric, per output channel or per block:

- ``plain``: float32, float16 or bfloat16 [S, N, K];
- ``fp8_channel``: float8_e4m3fn [S, N, K], scales float32 [S, N];
- ``fp8_block``: float8_e4m3fn [S, N, K], scales float32 [S, ceil(N / 128), ceil(K / 128)];
- ``int8``: int8 [S, N, K], scales float32 [S, N];
- ``int4``: uint8 [S, N, K / 2], scales float32 [S, N, K / 128]: in each group of 128 inputs the low
  halves of its 64 bytes are inputs 0..63, the high halves 64..127 (no shuffle is needed to unpack),
  each holding value + 8.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

FORMATS = ("plain", "fp8_channel", "fp8_block", "int8", "int4")
GROUP = 128  # inputs (and for fp8_block outputs too) that share a scale
STORED_DTYPES = {
    "fp8_channel": torch.float8_e4m3fn,
    "fp8_block": torch.float8_e4m3fn,
    "int8": torch.int8,
    "int4": torch.uint8,
}


@dataclass(frozen=True)
class ExpertWeights:
    """One matrix per slot: S slots of N outputs and K inputs.

    format: of ``FORMATS``; data and scales are as this module says, scales None when plain.
    bias: [S, N], any float dtype, added in float32, or None.
    """

    format: str
    data: torch.Tensor
    scales: torch.Tensor | None = None
    bias: torch.Tensor | None = None

    @property
    def num_slots(self) -> int:
        """S."""
        return self.data.shape[0]

    @property
    def num_outputs(self) -> int:
        """N."""
        return self.data.shape[1]

    @property
    def num_inputs(self) -> int:
        """K."""
        return self.data.shape[2] * (2 if self.format == "int4" else 1)
