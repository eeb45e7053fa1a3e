"""What holds for all tests: no time limits on single examples, one thread for torch."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# How long one example takes says more about the machine than about the code.
settings.register_profile("repo", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("repo")
