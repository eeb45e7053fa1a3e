"""What holds for all tests: no time limits on single examples, Triton in its interpreter."""

from __future__ import annotations

import os

# Before anything imports triton: there is no GPU in a test, and triton asks only once.
os.environ.setdefault("TRITON_INTERPRET", "1")

from hypothesis import HealthCheck, settings

# How long one example takes says more about the machine than about the code.
settings.register_profile("repo", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("repo")
