"""One way to log: plain lines with time, level, process part and module."""

from __future__ import annotations

import logging
import sys


def setup(part: str, level: str) -> None:
    """Sends all log lines of this process to stderr, marked with ``part`` (such as ``rank 1``)."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        logging.Formatter(f"%(asctime)s %(levelname)s [{part}] %(name)s: %(message)s", "%H:%M:%S")
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
