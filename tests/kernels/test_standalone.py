"""The library by itself: no moeserve, and no triton where there is no GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_USE = """
import sys
sys.modules["triton"] = None  # as if it were not installed
import torch
from moeserve_kernels import MODES, get_ops
from moeserve_kernels.operations import align, attention, exchange, kv_cache, mla, norm, quant
from moeserve_kernels.operations import moe, routing

weights, ids = routing.route(torch.randn(5, 8), 2)
w13, w2 = (quant.quantize_experts(torch.randn(8, *n), "int8") for n in ((64, 32), (32, 32)))
out = moe.moe_ffn(torch.randn(5, 32), w13, w2, weights, ids)
assert out.shape == (5, 32) and out.isfinite().all()
assert not [name for name in sys.modules if name.partition(".")[0] == "moeserve"]
"""


def test_the_cpu_needs_no_triton_and_nothing_of_moeserve() -> None:
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", _USE],
        env={"PYTHONPATH": str(root / "kernels"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
