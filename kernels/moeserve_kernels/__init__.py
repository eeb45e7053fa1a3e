"""The operations of a mixture-of-experts forward pass, several implementations of one signature.

``get_ops(mode)`` gives them; ``ops.Ops`` says what each one takes and returns:

- ``cpu``: torch (``cpu*.py``), and compiled code where torch is slow (``native.py``, ``csrc/``):
  bfloat16 weights on a CPU that can not multiply bfloat16;
- ``invariant``: each output row has the same bits whatever else is computed with it
  (``invariant*.py``);
- ``reference``: the shortest torch that says what is meant, exact enough in float64 to judge the
  others by (``reference.py``).
"""

from moeserve_kernels.ops import MODES, Ops, get_ops

__all__ = ["MODES", "Ops", "get_ops"]
