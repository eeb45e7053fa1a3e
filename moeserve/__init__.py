"""moeserve: a serving runtime made for mixture-of-experts language models."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moeserve.llm import LLM
    from moeserve.messages import SamplingParams

__all__ = ["LLM", "SamplingParams"]

# Loaded on demand: a rank or the HTTP process must not pay for what only the offline API needs.
_HOMES = {"LLM": "moeserve.llm", "SamplingParams": "moeserve.messages"}


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'moeserve' has no attribute {name!r}")
