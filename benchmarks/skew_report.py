"""The page of bench_skew: tables and pictures in one HTML file, or the pictures as one PNG."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.skew_cells import Served
from moeserve_placement.report import plotting

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #222; max-width: 1080px; margin: 2em auto;
  padding: 0 1em; }
.table { overflow-x: auto; } table { border-collapse: collapse; font-size: .85em; }
th, td { padding: .25em .6em; text-align: right; border-bottom: 1px solid #ddd; }
td:nth-child(-n+2), th:nth-child(-n+2) { text-align: left; }
img { max-width: 100%; height: auto; }
"""
_COLUMNS: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "workload": lambda r: r["workload"],
    "planner": lambda r: r["planner"],
    "requests at once": lambda r: r["concurrency"],
    "output tokens/s": lambda r: r["output_tokens_per_s"],
    "perfect balance would give": lambda r: r["floor_tokens_per_s"],
    "share of balanced": lambda r: r["share_of_balanced"],
    "balancedness asked": lambda r: r["balancedness_asked"],
    "as computed": lambda r: r["balancedness_computed"],
    "step ms": lambda r: r["step_ms"],
    "lost ms a step": lambda r: r["lost_ms_per_step"],
    "TTFT p50, p99 ms": lambda r: _two(r["ttft_ms"]),
    "ITL p50, p99 ms": lambda r: _two(r["itl_ms"]),
    "plans": lambda r: r["moves"]["plans"],
    "experts copied": lambda r: r["moves"]["experts"],
    "moved MB": lambda r: round(r["moves"]["bytes"] / 1e6, 1),
    "other cores": lambda r: r["other_cores"],
}
_NOTE = (
    "Balancedness is mean over largest load of the ranks, 1 is even. Lost is the time that the "
    "mean rank waited for the experts of the slowest one; perfect balance would give the same run "
    "without it (black line on a bar). Other cores: what the rest of the machine used meanwhile; "
    "above 0.1 the figures are not worth much. Differences below 10 % are noise on such a machine."
)

Records = Sequence[Mapping[str, Any]]
Lives = Mapping[tuple[str, str], Served]


def check_report(path: Path | None) -> None:
    """Fails before any work where the page could not be written at the end.

    Raises:
        ValueError: another ending than .html or .png, no such folder, no matplotlib.
    """
    if path is None:
        return
    if path.suffix not in (".html", ".png"):
        raise ValueError(f"report = {path}: the name must end in .html or .png")
    if not path.parent.is_dir():
        raise ValueError(f"report = {path}: the folder {path.parent} does not exist")
    plotting.load("matplotlib")


def save_report(records: Records, lives: Lives, path: Path) -> None:
    """Writes the page; an HTML page needs no other file and no network."""
    if path.suffix == ".html":
        path.write_text(to_html(records, lives))
        return
    out = io.BytesIO()
    with plotting.style():
        _figure(records, lives).savefig(out, format="png", dpi=110)
    path.write_bytes(out.getvalue())


def to_html(records: Records, lives: Lives) -> str:
    """The page."""
    first = records[0]
    facts = (
        f"{first['model']}, {first['ep']} ranks, {first['spare_slots']} spare slots a layer, "
        f"{first['repetitions']} repetitions; {first['hardware']['cpu']}, "
        f"{first['hardware']['cores']} cores; commit {first['commit']}; {first['time']}"
    )
    with plotting.style():
        picture = base64.b64encode(plotting.svg(_figure(records, lives))).decode("ascii")
    rows = [_row([column(r) for column in _COLUMNS.values()], "td") for r in records]
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>Load skew</title><style>{_STYLE}</style></head><body>",
            "<h1>What load skew costs, and what moving experts wins back</h1>",
            f"<p>{_text(facts)}</p>",
            f"<p>{_text(_NOTE)}</p>",
            f'<img alt="Rates, time lost and balance" src="data:image/svg+xml;base64,{picture}">',
            f'<div class="table"><table>{_row(list(_COLUMNS), "th")}{"".join(rows)}</table></div>',
            "</body></html>\n",
        ]
    )


def _figure(records: Records, lives: Lives) -> Any:
    """Rates and time lost at every concurrency, and below them balance over time."""
    names = list(dict.fromkeys(r["workload"] for r in records))
    sizes = list(dict.fromkeys(r["concurrency"] for r in records))
    series_rows = -(-len(names) // 3)
    height = 2.6 * (2 * len(sizes) + series_rows)
    figure = plotting.new_figure(11, height)
    rows = [2.6 * 2 * len(sizes), 2.6 * series_rows]
    top, below = figure.subfigures(2, 1, height_ratios=rows)
    axes = top.subplots(2 * len(sizes), 1, squeeze=False)[:, 0]
    for index, size in enumerate(sizes):
        chosen = [r for r in records if r["concurrency"] == size]
        _bars(axes[2 * index], chosen, names, "output_tokens_per_s", "floor_tokens_per_s")
        axes[2 * index].set_title(f"output tokens/s, {size} requests at once")
        _bars(axes[2 * index + 1], chosen, names, "lost_ms_per_step", None)
        axes[2 * index + 1].set_title(f"ms lost to the slowest rank, a step, {size} at once")
    axes[0].legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=6)
    below.suptitle("Balancedness as computed over seconds since the server was ready", fontsize=10)
    _series(below.subplots(series_rows, 3, sharey=True, squeeze=False), names, lives)
    return figure


def _bars(axis: Any, records: Records, names: Sequence[str], value: str, mark: str | None) -> None:
    """A group of bars a workload, a bar a planner, with a line where ``mark`` is."""
    planners = list(dict.fromkeys(r["planner"] for r in records))
    width = 0.8 / len(planners)
    for index, planner in enumerate(planners):
        chosen = {r["workload"]: r for r in records if r["planner"] == planner}
        places = [i + (index - (len(planners) - 1) / 2) * width for i in range(len(names))]
        heights = [chosen[name][value] for name in names]
        axis.bar(places, heights, width * 0.92, label=planner, color=plotting.COLOURS[index])
        if mark is not None:
            marks = [chosen[name][mark] for name in names]
            ends = [place - width / 2 for place in places], [place + width / 2 for place in places]
            axis.hlines(marks, *ends, color="black", linewidth=1.2)
    axis.set_xticks(range(len(names)), names)
    axis.grid(axis="x", visible=False)


def _series(axes: Any, names: Sequence[str], lives: Lives) -> None:
    planners = list(dict.fromkeys(planner for _, planner in lives))
    for index, axis in enumerate(axes.ravel()):
        if index >= len(names):
            axis.set_visible(False)
            continue
        for number, planner in enumerate(planners):
            series = lives[names[index], planner].series
            look = {**plotting.look(number), "marker": None}
            axis.plot(*zip(*series, strict=True), label=planner, linewidth=1.2, **look)
        axis.set_title(names[index])
        axis.set_ylim(0, 1.05)


def _two(summary: Mapping[str, float] | None) -> str:
    return "" if summary is None else f"{summary['p50']:.1f}, {summary['p99']:.1f}"


def _row(values: Sequence[Any], tag: str) -> str:
    cells = "".join(f"<{tag}>{_text('' if v is None else v)}</{tag}>" for v in values)
    return f"<tr>{cells}</tr>"


def _text(value: Any) -> str:
    return html.escape(str(value))
