"""Draws training windows from the token arrays, in given shares per domain."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

# Percent of the windows. MAIN_MIX keeps real text high; FINAL_MIX ends on chat.
MAIN_MIX: dict[str, float] = {
    "chat": 22,
    "stories": 8,
    "prose": 14,
    "dictionary": 12,
    "code": 11,
    "speech": 8,
    "world": 8,
    "docs": 8,
    "plays": 7,
    "jargon": 2,
}
FINAL_MIX: dict[str, float] = {
    "chat": 45,
    "stories": 5,
    "prose": 9,
    "dictionary": 8,
    "code": 8,
    "speech": 5,
    "world": 6,
    "docs": 6,
    "plays": 6,
    "jargon": 2,
}


class WindowSampler:
    """Draws [batch, length + 1] windows; half of them begin where a document begins."""

    def __init__(self, tokens: Path, *, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.arrays = {
            domain: np.fromfile(tokens / f"{domain}.train.bin", dtype=np.uint16)
            for domain in MAIN_MIX
        }
        self.starts = {domain: np.flatnonzero(array == 0) for domain, array in self.arrays.items()}

    def draw(self, batch: int, length: int, mix: dict[str, float]) -> Tensor:
        """Return int64 token ids, the domain of each row drawn from the mix."""
        shares = np.array(list(mix.values()))
        domains = self.rng.choice(list(mix), batch, p=shares / shares.sum())
        return torch.from_numpy(np.stack([self.window(domain, length) for domain in domains]))

    def window(self, domain: str, length: int) -> np.ndarray:
        """Return one window of a domain."""
        array, last = self.arrays[domain], len(self.arrays[domain]) - length - 1
        if self.rng.random() < 0.5:
            start = int(self.rng.choice(self.starts[domain]))
        else:
            start = int(self.rng.integers(last))
        start = min(start, last)
        return array[start : start + length + 1].astype(np.int64)
