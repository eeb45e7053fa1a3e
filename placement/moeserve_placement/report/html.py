"""A comparison as one file: an HTML page with its pictures inside, or a PNG of the pictures."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Sequence
from pathlib import Path

from moeserve_placement.placement import PlacementError
from moeserve_placement.replay.results import Comparison
from moeserve_placement.replay.summary import balance_rows, cost_rows, findings, label_rows
from moeserve_placement.report.figures import Picture, drawn, pictures
from moeserve_placement.report.plotting import load, new_figure, style, svg
from moeserve_placement.report.words import (
    batch_words,
    bytes_words,
    header_lines,
    printable,
    sampling_words,
    split_words,
    spread_words,
)
from moeserve_placement.traces.files import replacing, write_text

_DPI = 110
_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #222; max-width: 1080px; margin: 2em auto;
  padding: 0 1em; }
h1 { font-size: 1.5em; } h2 { font-size: 1.15em; margin: 1.8em 0 .3em; }
.table { overflow-x: auto; } table { border-collapse: collapse; font-size: .87em; }
th, td { padding: .25em .7em; text-align: right; border-bottom: 1px solid #ddd; }
td { white-space: nowrap; }
th { border-bottom: 2px solid #888; } td:first-child, th:first-child { text-align: left; }
figure { margin: 0; } img { max-width: 100%; height: auto; }
figcaption, .note { color: #555; font-size: .87em; }
"""
_CELL = tuple[str, ...]


def check_report(paths: Sequence[Path]) -> None:
    """Fails before any work where a report could not be written at the end.

    Raises:
        PlacementError: a name that ends in neither .html nor .png, no such folder, no matplotlib.
    """
    for path in paths:
        if path.suffix not in (".html", ".png"):
            raise PlacementError(f"report = {path}: the name must end in .html or .png")
        check_folder("report", path)
        load("matplotlib")


def check_folder(name: str, path: Path) -> None:
    """Raises PlacementError where the folder of a file to write does not exist."""
    if not path.parent.is_dir():
        raise PlacementError(f"{name} = {path}: the folder {path.parent} does not exist")


def save_report(comparison: Comparison, path: Path) -> None:
    """Writes the report; ``path`` ends in .html or .png.

    Raises:
        PlacementError: another ending, or no matplotlib.
        TraceError: it can not be written.
    """
    check_report([path])
    if path.suffix == ".html":
        write_text(path, to_html(comparison))
        return
    with replacing(path) as partial:
        partial.write_bytes(to_png(comparison))


def to_html(comparison: Comparison) -> str:
    """The page; it needs no other file and no network."""
    title = f"Expert placement: {comparison.trace}"
    parts = [
        "<!doctype html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>{_text(title)}</title>',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<style>{_STYLE}</style></head><body>",
        f"<h1>{_text(title)}</h1>",
        *(f"<p>{_text(line)}</p>" for line in header_lines(comparison)),
        "<h2>Findings</h2>",
        _list([*findings(comparison), *comparison.notes]),
        "<h2>Balance</h2>",
        _balance(comparison),
        "<h2>Cost and traffic</h2>",
        _cost(comparison),
        *_domains(comparison),
        *(_figure(comparison, picture) for picture in pictures(comparison)),
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def to_png(comparison: Comparison) -> bytes:
    """All pictures below each other as one PNG."""
    shown = pictures(comparison)
    with style():
        heights = [picture.height + 0.35 for picture in shown]
        figure = new_figure(max(picture.width for picture in shown), sum(heights) + 0.8)
        heading = "\n".join(map(drawn, header_lines(comparison)))
        figure.suptitle(heading, fontsize=10, x=0.01, ha="left")
        parts = figure.subfigures(len(shown), 1, height_ratios=heights, squeeze=False)[:, 0]
        for part, picture in zip(parts, shown, strict=True):
            part.suptitle(picture.title, fontsize=11, x=0.01, ha="left", weight="bold")
            picture.draw(part, comparison)
        out = io.BytesIO()
        figure.savefig(out, format="png", dpi=_DPI)
    return out.getvalue()


def _figure(comparison: Comparison, picture: Picture) -> str:
    with style():
        figure = new_figure(picture.width, picture.height)
        picture.draw(figure, comparison)
        data = base64.b64encode(svg(figure)).decode("ascii")
    return (
        f"<h2>{_text(picture.title)}</h2><figure>"
        f'<img alt="{_text(picture.title)}" src="data:image/svg+xml;base64,{data}">'
        f"<figcaption>{_text(picture.caption)}</figcaption></figure>"
    )


def _balance(comparison: Comparison) -> str:
    head = "planner|split|batch|batches|mean|p99|worst layer (which)|balancedness SGLang|"
    head += "balancedness vLLM|time lost"
    rows = [
        (
            row.label,
            split_words(row.split),
            batch_words(row.batch_size),
            f"{row.num_batches:,}",
            spread_words(row.mean),
            spread_words(row.p99),
            f"{spread_words(row.worst_layer_mean)} ({row.worst_layer})",
            spread_words(row.balancedness_sglang),
            spread_words(row.balancedness_vllm),
            f"{row.time_lost.mean:.1%}",
        )
        for row in balance_rows(comparison)
    ]
    note = (
        "Imbalance is the fullest over the mean rank, 1 is perfect; p99 over batches and layers. "
        "Fixed split: even over an expert's copies, or the shares that the plan came with. "
        "Balancedness is mean over fullest as the two engines log it. Time lost: against perfect "
        f"balance, if time is tokens{sampling_words(comparison)}."
    )
    return _table(tuple(head.split("|")), rows) + _note(note)


def _cost(comparison: Comparison) -> str:
    head = "planner|plans|copies / plan|bytes / plan|ms / plan|ms / layer|first plan ms|"
    head += "plan error|ranks / token|nodes / token|fewest nodes|node imbalance|with fewest|"
    head += "sent in node|sent between nodes"
    rows = [
        (
            row.label,
            str(row.num_plans),
            f"{row.copies.mean:,.1f}",
            bytes_words(row.num_bytes.mean),
            f"{row.plan_ms.mean:,.1f}",
            f"{row.plan_ms_per_layer.mean:,.2f}",
            f"{row.first_plan_ms.mean:,.1f}",
            "-" if row.plan_error is None else f"{row.plan_error.mean:+.3f}",
            spread_words(row.ranks_per_token, digits=2),
            spread_words(row.nodes_per_token, digits=2),
            spread_words(row.nodes_per_token_fewest, digits=2),
            spread_words(row.node_imbalance),
            spread_words(row.node_imbalance_fewest),
            "-" if row.node_bytes is None else bytes_words(row.node_bytes.mean),
            "-" if row.fabric_bytes is None else bytes_words(row.fabric_bytes.mean),
        )
        for row in cost_rows(comparison)
    ]
    settings = comparison.settings
    note = (
        f"One expert of one layer has {bytes_words(comparison.topology.bytes_per_expert)}, a "
        f"hidden state {bytes_words(settings.token_bytes)}. Plan error: realised less predicted "
        "imbalance. Nodes and ranks per token where copies take turns; 'fewest nodes' where the "
        "copy is chosen that touches fewest. Sent: per token and layer, to other ranks."
    )
    return _table(tuple(head.split("|")), rows) + _note(note)


def _domains(comparison: Comparison) -> list[str]:
    rows = label_rows(comparison)
    names = sorted({name for row in rows.values() for name in row})
    if len(names) < 2:
        return []
    cells = [
        (label, *(f"{row[name]:.3f}" if name in row else "-" for name in names))
        for label, row in rows.items()
    ]
    note = "Mean imbalance under the fixed split; a window counts for the domain it has most of."
    return ["<h2>Imbalance by domain</h2>", _table(("planner", *names), cells) + _note(note)]


def _table(head: _CELL, rows: Sequence[_CELL]) -> str:
    lines = ["".join(f"<th>{_text(cell)}</th>" for cell in head)]
    lines += ["".join(f"<td>{_text(cell)}</td>" for cell in row) for row in rows]
    body = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="table"><table>\n{body}\n</table></div>'


def _list(sentences: Sequence[str]) -> str:
    items = "".join(f"<li>{_text(sentence)}</li>" for sentence in sentences)
    return f"<ul>{items}</ul>" if items else "<p>No planner to hold against another.</p>"


def _note(text: str) -> str:
    return f'<p class="note">{_text(text)}</p>'


def _text(value: str) -> str:
    return html.escape(printable(value), quote=True)
