"""From one format to another: what a file holds decides, and what gets lost is said."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moeserve_placement.placement import Placement
from moeserve_placement.traces.detect import FORMATS, Data, Format, get_format, open_as
from moeserve_placement.traces.options import ReadOptions
from moeserve_placement.traces.trace import (
    CountTrace,
    RoutingTrace,
    TraceError,
    check_counts_size,
)
from moeserve_placement.traces.windows import count_windows


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """What a conversion did. lost: one phrase for each thing the written file does not say."""

    source_format: str
    target_format: str
    what: str
    lost: tuple[str, ...]


def convert(
    source: Path,
    target: Path,
    *,
    source_format: str | None = None,
    target_format: str | None = None,
    options: ReadOptions | None = None,
    tokens_per_window: int = 2048,
) -> Conversion:
    """Reads a trace or placement and writes it in another format.

    source_format: None: found by content. target_format: None: by the suffix of ``target`` and what
    the source holds. tokens_per_window: window of a routing trace that is written as counts.

    Raises:
        TraceError: a file can not be read or written, or the target can not hold such data.
    """
    if tokens_per_window < 1:
        raise TraceError(f"tokens_per_window = {tokens_per_window}: must be at least 1")
    options = options or ReadOptions()
    reader, data = open_as(source, options, format_name=source_format)
    writer = get_format(target_format) if target_format else infer_format(target, data)
    lost: tuple[str, ...] = ()
    if isinstance(data, RoutingTrace) and RoutingTrace not in writer.writes:
        if CountTrace not in writer.writes:
            raise _refusal(writer, data)
        check_counts_size(data, tokens_per_window, max_bytes=options.max_bytes)
        data = count_windows(data, tokens_per_window)
        lost = (f"tokens: only counts of windows of {tokens_per_window} tokens are kept",)
    if writer.write is None or not isinstance(data, writer.writes):
        raise _refusal(writer, data)
    lost += writer.write(target, data)
    return Conversion(
        source_format=reader.name, target_format=writer.name, what=summary(data), lost=lost
    )


def infer_format(path: Path, data: Data) -> Format:
    """The first format with the suffix of ``path`` that can hold ``data``.

    Raises:
        TraceError: there is none; the text lists what there is.
    """
    suffix = ".yaml" if path.suffix == ".yml" else path.suffix
    for item in FORMATS.values():
        if item.suffix == suffix and isinstance(data, item.writes):
            return item
    if isinstance(data, CountTrace) and suffix == ".npy":
        return FORMATS["vllm"]
    able = [item.name for item in FORMATS.values() if isinstance(data, item.writes)]
    raise TraceError(
        f"{path}: the suffix {path.suffix!r} names no format for {summary(data)}; name one of "
        f"{', '.join(able)}"
    )


def summary(data: Data) -> str:
    """One phrase: what the data is and how much of it."""
    if isinstance(data, Placement):
        return (
            f"a placement of {data.num_experts} experts in {len(data.layers)} layers on "
            f"{data.num_ranks} ranks"
        )
    size = f"{data.num_layers} layers, {data.num_experts} experts"
    if isinstance(data, CountTrace):
        return f"counts of {data.num_windows:,} windows, {size}"
    return (
        f"routing of {data.num_tokens:,} tokens in {data.num_sequences:,} sequences, {size}, "
        f"top-{data.top_k}"
    )


def _refusal(writer: Format, data: Any) -> TraceError:
    able = [item.name for item in FORMATS.values() if isinstance(data, item.writes)]
    return TraceError(
        f"format {writer.name} can not hold {summary(data)}; these can: {', '.join(able)}"
    )
