"""The token routing logs of ESFT: one text file per layer, one line per sequence.

A folder holds ``expert_weights_<layer>.txt`` files; a line is the expert ids of all tokens of one
sequence, top_k after top_k, separated by tabs, then an empty field, then as many gate weights. A
folder of such folders is one trace whose labels are the folders' names (the domains).
Layout as in the repository deepseek-ai/ESFT, results/expert_scores.
"""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import quote, unquote

import numpy as np

from moeserve_placement.traces.files import read_text, reading
from moeserve_placement.traces.options import ReadOptions
from moeserve_placement.traces.trace import (
    MAX_EXPERTS,
    MAX_TOP_K,
    Array,
    RoutingTrace,
    TraceError,
)

_NAME = re.compile(r"expert_weights_(0|[1-9][0-9]{0,5})\.txt")
_MIN_EVIDENCE = 50
"""Tokens that must agree with an inferred top_k. Twice the true value then has 50 chances to show
an expert twice; for 8 of 256 experts it escapes with probability 0.78^50."""

Line = tuple[Array, Array]


def read_esft(path: Path, options: ReadOptions | None = None) -> RoutingTrace:
    """The trace of an ESFT folder, or of a folder of them.

    The files do not hold top_k: without the option it is the largest number that divides every
    line and never puts an expert twice into one token. Weights are read as float32. Options:
    top_k, num_experts (else the highest id plus one), max_bytes (of all text).

    Raises:
        TraceError: no such files, lines that do not agree between layers, text that is not such a
            log, or too few tokens to tell top_k.
    """
    options = options or ReadOptions()
    with reading(path):
        folders = _folders(path)
        names = [folder.name for folder in folders]
        layers = _layers(folders)
        _check_size(folders, max_bytes=options.max_bytes)
        logs = [[_read_log(folder, layer) for layer in layers] for folder in folders]
        lines = [list(zip(*log, strict=True)) for log in logs]
        flat = [line for folder_lines in lines for line in folder_lines]
        top_k = _infer_top_k(flat) if options.top_k is None else options.top_k
        ids, weights = _join(flat, top_k)
        is_labelled = folders != [path]
        labels = [name for name, part in zip(names, lines, strict=True) for _ in part]
        return RoutingTrace(
            topk_ids=ids,
            num_experts=options.experts_of(int(ids.max())),
            layer_ids=layers,
            sequence_lengths=np.array([line[0][0].size // top_k for line in flat]),
            topk_weights=weights,
            labels=tuple(unquote(label) for label in labels) if is_labelled else None,
            metadata={"source_format": "esft"},
        )


def is_esft(path: Path) -> bool:
    """Whether a folder holds ESFT logs, itself or in its folders."""
    return path.is_dir() and bool(_folders(path, missing_ok=True))


def write_esft(path: Path, trace: RoutingTrace) -> tuple[str, ...]:
    """Writes a new folder of logs, with a folder per label where there are labels.

    A trace without weights gets 1 / top_k for every choice, since the format needs some. Says what
    is lost.

    Raises:
        TraceError: the folder exists and is not empty, or can not be written.
    """
    with reading(path):
        path.mkdir(parents=True, exist_ok=True)
        if any(path.iterdir()):
            raise TraceError("the folder is not empty")
        if trace.labels is None:
            _write_folder(path, trace)
        else:
            # In order of first appearance; the reader takes folders in order of name.
            for label in dict.fromkeys(trace.labels):
                folder = path / _folder_name(label)
                folder.mkdir()
                _write_folder(folder, trace.select([label]))
    lost = ["top_k: give it when reading, where few tokens may hide it", "num_experts"]
    if trace.topk_weights is None:
        lost.append("that there were no weights: each is written as 1 / top_k")
    elif trace.topk_weights.dtype != np.float32:
        lost.append("the type of the weights: read back as float32")
    if trace.labels is not None and list(trace.labels) != sorted(trace.labels, key=_folder_name):
        lost.append("the order of sequences of different labels")
    lost += [name for name in ("arrival_times_s", "metadata") if _has(trace, name)]
    return tuple(lost)


def _has(trace: RoutingTrace, name: str) -> bool:
    value = getattr(trace, name)
    return value is not None and len(value) > 0


def _folders(path: Path, *, missing_ok: bool = False) -> list[Path]:
    """The folder itself, or its sub-folders that hold logs, by name."""
    if not path.is_dir():
        raise TraceError("must be a folder of expert_weights_<layer>.txt files")
    if _layer_files(path):
        return [path]
    folders = sorted(item for item in path.iterdir() if item.is_dir() and _layer_files(item))
    if not folders and not missing_ok:
        raise TraceError("has no expert_weights_<layer>.txt files, nor has any folder in it")
    return folders


def _layer_files(folder: Path) -> dict[int, Path]:
    matches = ((_NAME.fullmatch(item.name), item) for item in folder.iterdir())
    return {int(match[1]): item for match, item in matches if match}


def _layers(folders: list[Path]) -> tuple[int, ...]:
    layers = tuple(sorted(_layer_files(folders[0])))
    for folder in folders[1:]:
        if tuple(sorted(_layer_files(folder))) != layers:
            raise TraceError(f"{folder.name} and {folders[0].name}: have files of other layers")
    return layers


def _check_size(folders: list[Path], *, max_bytes: int) -> None:
    """Refuses logs whose arrays could exceed max_bytes: a number takes two characters or more."""
    files = [path for folder in folders for path in _layer_files(folder).values()]
    total = sum(path.stat().st_size for path in files)
    if total > max_bytes:
        raise TraceError(f"has {total:,} bytes of text, more than {max_bytes:,} (max_bytes)")


def _read_log(folder: Path, layer: int) -> list[Line]:
    name = f"expert_weights_{layer}.txt"
    lines = read_text(folder / name).split("\n")
    if lines and not lines[-1]:
        lines.pop()
    if not lines:
        raise TraceError(f"{folder.name}/{name}: is empty")
    return [
        _parse_line(line, f"{folder.name}/{name}, line {i + 1}") for i, line in enumerate(lines)
    ]


def _parse_line(line: str, where: str) -> Line:
    parts = line.strip("\r\n").split("\t\t")
    if len(parts) != 2:
        raise TraceError(f"{where}: must be ids, an empty field, weights, all separated by tabs")
    try:
        ids = np.array(list(map(int, parts[0].split("\t"))), dtype=np.int64)
        weights = np.array(list(map(float, parts[1].split("\t"))), dtype=np.float64)
    except (ValueError, OverflowError) as error:
        raise TraceError(f"{where}: holds something else than a number") from error
    if ids.size != weights.size:
        raise TraceError(f"{where}: has {ids.size} ids but {weights.size} weights, or is cut off")
    if int(ids.min()) < 0 or int(ids.max()) >= MAX_EXPERTS:
        raise TraceError(f"{where}: has an expert id outside [0, {MAX_EXPERTS})")
    return ids, weights


def _infer_top_k(lines: list[tuple[Line, ...]]) -> int:
    divisor = int(np.gcd.reduce([ids.size for line in lines for ids, _ in line]))
    for top_k in range(min(divisor, MAX_TOP_K), 0, -1):
        if divisor % top_k == 0 and all(
            _is_distinct(ids.reshape(-1, top_k)) for line in lines for ids, _ in line
        ):
            break
    evidence = sum(ids.size // top_k for line in lines for ids, _ in line)
    if evidence < _MIN_EVIDENCE:
        raise TraceError(
            f"top_k: {top_k} would fit, but the log has only {evidence} tokens x layers to tell it "
            "from its divisors; give top_k"
        )
    return top_k


def _is_distinct(groups: Array) -> bool:
    ordered = np.sort(groups, axis=1)
    return bool((ordered[:, 1:] != ordered[:, :-1]).all())


def _join(lines: list[tuple[Line, ...]], top_k: int) -> tuple[Array, Array]:
    ids, weights = [], []
    for i, line in enumerate(lines):
        sizes = {layer_ids.size for layer_ids, _ in line}
        size = sizes.pop()
        if sizes or size % top_k:
            raise TraceError(
                f"sequence {i}: must have one number of ids in all layers, a multiple of top_k = "
                f"{top_k}"
            )
        ids.append(np.stack([part.reshape(-1, top_k) for part, _ in line], axis=1))
        weights.append(np.stack([part.reshape(-1, top_k) for _, part in line], axis=1))
    with np.errstate(over="ignore"):  # an overflow becomes infinite, which the trace refuses
        joined = np.concatenate(weights).astype(np.float32)
    return np.concatenate(ids).astype(np.uint16), joined


def _folder_name(label: str) -> str:
    name = quote(label, safe=" ")
    if name.strip(". ") != name or not name or len(name) > 200:
        raise TraceError(f"label {label[:60]!r}: can not be the name of a folder")
    return name


def _write_folder(folder: Path, trace: RoutingTrace) -> None:
    if trace.topk_weights is None:
        weights = np.full(trace.topk_ids.shape, 1 / trace.top_k, dtype=np.float32)
    else:
        with np.errstate(over="ignore"):
            weights = trace.topk_weights.astype(np.float32)
        if not np.isfinite(weights).all():
            raise TraceError("topk_weights: holds a number beyond float32, which ESFT logs lack")
    starts = trace.sequence_starts.tolist()
    spans = list(zip(starts, trace.sequence_lengths.tolist(), strict=True))
    for i, layer in enumerate(trace.layer_ids):
        with (folder / f"expert_weights_{layer}.txt").open("w", encoding="utf-8") as stream:
            for start, length in spans:
                ids = trace.topk_ids[start : start + length, i].ravel().tolist()
                gates = weights[start : start + length, i].ravel()
                # str of a numpy float is the shortest text that reads back as the same value.
                stream.write("\t".join(map(str, ids)) + "\t\t" + "\t".join(map(str, gates)) + "\n")
