"""Figures as words, the same in the terminal and in the report."""

from __future__ import annotations

import unicodedata

from moeserve_placement.replay.results import BATCH, FIXED, Comparison, Spread
from moeserve_placement.topology import Topology

_ACTING = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Unicode categories that a terminal or a page acts on: control, format, surrogates, breaks."""


def printable(text: str) -> str:
    """``text`` on one line, with a replacement character for all that would not be shown."""
    if text.isprintable():
        return text
    shown = (" " if char in "\t\n\r" else char for char in text)
    return "".join("\ufffd" if unicodedata.category(char) in _ACTING else char for char in shown)


def spread_words(spread: Spread | None, *, digits: int = 3) -> str:
    """'1.234', with several seeds '1.234±0.010' (half the range); '-' for None."""
    if spread is None:
        return "-"
    half = (spread.high - spread.low) / 2
    text = f"{spread.mean:.{digits}f}"
    return f"{text}±{half:.{digits}f}" if half > 0 else text


def bytes_words(value: float) -> str:
    """'17.3 MB': decimal units, three digits."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 999.5 or unit == "TB":
            break
        value /= 1000
    digits = 0 if unit == "B" or value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:,.{digits}f} {unit}"


def batch_words(size: int) -> str:
    """'2,048'; 'window' for a trace of counts."""
    return f"{size:,}" if size else "window"


def split_words(split: str) -> str:
    """How tokens are split over the copies of their expert."""
    return "per batch" if split == BATCH else "fixed"


def topology_words(topology: Topology) -> str:
    """'8 ranks x 9 slots on 2 nodes'."""
    slots = sorted(set(topology.slots_per_rank))
    each = str(slots[0]) if len(slots) == 1 else f"{slots[0]}-{slots[-1]}"
    text = f"{topology.num_ranks} ranks x {each} slots"
    if topology.num_nodes > 1:
        text += f" on {topology.num_nodes} nodes"
    gone = topology.alive.count(False)
    if gone:
        text += f", {counted(gone, 'rank')} gone"
    if len(set(topology.speed_of_rank)) > 1:
        text += ", unequal speeds"
    return text


def sampling_words(comparison: Comparison) -> str:
    """'; split per batch: ...' where not all batches were solved for, else nothing."""
    run = comparison.runs[0]
    sampled = any(
        len(levels.mean) < len(run.levels[FIXED, size].mean)
        for (split, size), levels in run.levels.items()
        if split == BATCH
    )
    most = comparison.settings.max_solved
    return f"; split per batch: {most} batches of each window, evenly spaced" if sampled else ""


def counted(number: int, noun: str) -> str:
    """'1 window', '2,048 tokens'."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def header_lines(comparison: Comparison) -> list[str]:
    """What was played on what."""
    settings = comparison.settings
    name, facts = printable(comparison.trace), ", ".join(comparison.facts.values())
    shape = comparison.expert_load.shape
    scored = len(next(iter(comparison.window_labels.values())))
    lines = [
        f"{name}: {printable(facts)}" if facts else name,
        f"{topology_words(comparison.topology)}; {shape[1]} experts in {shape[0]} layers",
    ]
    is_counts = comparison.batch_of(comparison.runs[0]) == 0
    window = f"{counted(scored, 'window')} of "
    window += "counts" if is_counts else counted(settings.window_tokens, "token")
    if settings.order == "holdout":
        when = "planned once on the first half of each domain, scored on the second halves"
        if settings.leave_out:
            when += f"; {settings.leave_out!r} left out of planning"
    elif settings.interval:
        when = f"a plan every {_times(settings.interval)} for what comes next"
    else:
        when = f"one plan after {_times(settings.warmup_windows)}"
    lines.append(f"order: {settings.order}; {window} scored; {when}")
    if len(comparison.seeds) > 1:
        lines.append(f"{len(comparison.seeds)} seeds; ± is half the range")
    return lines


def _times(windows: int) -> str:
    return "window" if windows == 1 else f"{windows} windows"
