"""Freed memory stays with the process: a large buffer costs page faults the first time only."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys, torch
sys.path.insert(0, "kernels")
from moeserve_kernels.cpu_memory import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(12 << 20)  # 48 MiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

torch.set_num_threads(1)
faults()
without = faults()
assert keep_freed_memory()
for _ in range(10):  # aligned buffers settle in the heap after a few rounds
    faults()
print(without, faults())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
def test_no_faults_for_memory_that_was_there():
    command = [sys.executable, "-c", SCRIPT]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    without, kept = map(int, result.stdout.split())
    assert without > 20 * (kept + 1)
