"""The operations of a mixture-of-experts model; see the README beside this package.

``operations`` holds them one by one, checked and documented, for CPU and GPU tensors alike.
``get_ops(mode)`` gives them as a decoder calls them, ``ops.Ops`` says what each takes and returns:

- ``cpu``: torch (``cpu*.py``), and compiled code where torch is slow (``native.py``, ``csrc/``):
  bfloat16 weights on a CPU that can not multiply bfloat16;
- ``invariant``: each output row has the same bits whatever else is computed with it
  (``invariant*.py``);
- ``triton``: Triton kernels, for a GPU (``triton_ops.py``);
- ``reference``: the shortest torch that says what is meant, exact enough in float64 to judge the
  others by (``reference.py``).
"""

from moeserve_kernels.ops import MODES, Ops, get_ops

__all__ = ["MODES", "Ops", "get_ops"]
