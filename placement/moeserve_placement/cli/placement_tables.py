"""A comparison in the terminal: tables of balance, of costs and by domain, and the verdict."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from moeserve_placement.cli.shared import plain, print_line
from moeserve_placement.replay.results import Comparison
from moeserve_placement.replay.summary import (
    CostRow,
    balance_rows,
    cost_rows,
    findings,
    label_rows,
)
from moeserve_placement.report.words import (
    batch_words,
    bytes_words,
    header_lines,
    sampling_words,
    split_words,
    spread_words,
)

_MOST_DOMAINS = 8
_PIPED_WIDTH = 120


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Prints everything, widths chosen so that 100 columns do for one seed."""
    if not console.is_terminal:
        console.width = max(console.width, _PIPED_WIDTH)
    for line in header_lines(comparison):
        print_line(console, line)
    console.print(_balance_table(comparison))
    console.print(_cost_table(comparison))
    domains = _domain_table(comparison)
    if domains is not None:
        console.print(domains)
    for sentence in [*findings(comparison), *comparison.notes]:
        print_line(console, sentence)


def _table(title: str, caption: str) -> Table:
    table = Table(
        title=title,
        caption=caption or None,
        box=SIMPLE_HEAD,
        title_justify="left",
        caption_justify="left",
        padding=(0, 1, 0, 0),
    )
    table.add_column("planner", no_wrap=True)
    return table


def _add_columns(table: Table, names: list[str]) -> None:
    for name in names:
        table.add_column(plain(name), justify="right", no_wrap=True)


def _balance_table(comparison: Comparison) -> Table:
    table = _table(
        "Balance: fullest / mean rank, 1 is perfect",
        "p99 over batches and layers; worst: the layer with the largest mean; balancedness (mean / "
        f"fullest) as SGLang and as vLLM log it{sampling_words(comparison)}",
    )
    table.add_column("split", no_wrap=True)
    sizes = sorted({row.batch_size for row in balance_rows(comparison)})
    if len(sizes) > 1:
        _add_columns(table, ["batch"])
    _add_columns(table, ["mean", "p99", "worst (layer)", "SGLang", "vLLM", "time lost"])
    row_sizes = {(row.split, row.batch_size) for row in balance_rows(comparison)}
    before = ""
    for row in balance_rows(comparison):
        if before and row.label != before and len(row_sizes) > 1:
            table.add_section()
        label = plain("" if row.label == before else row.label)
        cells = [split_words(row.split)]
        if len(sizes) > 1:
            cells.append(batch_words(row.batch_size))
        cells += [
            spread_words(row.mean),
            spread_words(row.p99),
            f"{spread_words(row.worst_layer_mean)} ({row.worst_layer})",
            spread_words(row.balancedness_sglang),
            spread_words(row.balancedness_vllm),
            f"{row.time_lost.mean:.1%}",
        ]
        table.add_row(label, *cells)
        before = row.label
    return table


def _cost_table(comparison: Comparison) -> Table:
    size = comparison.topology.bytes_per_expert
    table = _table(
        f"Cost: copies and time per plan, traffic (expert {bytes_words(size)})",
        _cost_caption(comparison),
    )
    names = ["plans", "copies", "bytes", "ms", "ms/layer", "error"]
    rows = cost_rows(comparison)
    has_traffic = rows[0].ranks_per_token is not None
    if has_traffic:
        names += ["ranks/token", "sent/token"]
    if has_traffic and comparison.topology.num_nodes > 1:
        names += ["nodes/token", "fewest", "node imb."]
    _add_columns(table, names)
    for row in rows:
        table.add_row(plain(row.label), *_cost_cells(row, names))
    return table


def _cost_caption(comparison: Comparison) -> str:
    text = "error: realised less predicted imbalance"
    if any(run.traffic for run in comparison.runs):
        text += (
            f"; sent: bytes to other ranks per token and layer, {comparison.settings.token_bytes}"
        )
        text += " a hidden state"
        if comparison.topology.num_nodes > 1:
            text += "; fewest: nodes/token where the copy on fewest nodes is chosen"
    return text


def _cost_cells(row: CostRow, names: list[str]) -> list[str]:
    sent = None
    if row.fabric_bytes is not None and row.node_bytes is not None:
        sent = row.fabric_bytes.mean + row.node_bytes.mean
    cells = {
        "plans": str(row.num_plans),
        "copies": f"{row.copies.mean:,.1f}",
        "bytes": bytes_words(row.num_bytes.mean),
        "ms": f"{row.plan_ms.mean:,.1f}",
        "ms/layer": f"{row.plan_ms_per_layer.mean:,.2f}",
        "error": "-" if row.plan_error is None else f"{row.plan_error.mean:+.3f}",
        "ranks/token": spread_words(row.ranks_per_token, digits=2),
        "sent/token": "-" if sent is None else bytes_words(sent),
        "nodes/token": spread_words(row.nodes_per_token, digits=2),
        "fewest": spread_words(row.nodes_per_token_fewest, digits=2),
        "node imb.": spread_words(row.node_imbalance),
    }
    return [cells[name] for name in names]


def _domain_table(comparison: Comparison) -> Table | None:
    rows = label_rows(comparison)
    names = sorted({name for row in rows.values() for name in row})
    if not 2 <= len(names) <= _MOST_DOMAINS:
        return None
    table = _table("Imbalance by domain", "mean, fixed split")
    _add_columns(table, names)
    for label, row in rows.items():
        cells = (f"{row[name]:.3f}" if name in row else "-" for name in names)
        table.add_row(plain(label), *cells)
    return table
