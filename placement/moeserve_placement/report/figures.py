"""The pictures of a comparison. Each draws into a matplotlib figure or sub-figure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from moeserve_placement.replay.results import FIXED, REFERENCE, Comparison, Run
from moeserve_placement.replay.summary import BalanceRow, balance_rows, cost_rows
from moeserve_placement.report.plotting import (
    AROUND_ONE,
    COLOURS,
    MAP,
    REFERENCE_COLOUR,
    load,
    look,
)
from moeserve_placement.report.words import printable

_MOST_MAPS = 4
_WIDTH_CHARACTERS = 95  # of small print over the width of the time axis
_LEAST_CHARACTERS = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A picture: what it shows, its size in inches, and what draws it."""

    title: str
    caption: str
    height: float
    draw: Callable[[Any, Comparison], None]
    width: float = 9.5


def pictures(comparison: Comparison) -> list[Picture]:
    """The pictures that this comparison has something to show in."""
    maps = len(mapped_runs(comparison))
    layer = comparison.layer_ids[comparison.shown_layer]
    found = [
        Picture(
            title=f"Load of every rank over time, before and after (layer {layer})",
            caption="The layer with the worst balance under the linear placement. "
            "Colour: rank level over the mean of all ranks; white is perfect, orange is too full, "
            "purple is idle; one scale for all.",
            height=0.7 + 1.75 * maps,
            draw=draw_heat_maps,
        ),
        Picture(
            title="Imbalance over time, with moves",
            caption="Fullest over mean rank, mean over layers, fixed split. Below: experts copied "
            "by the plan before each window; the first placement is not counted.",
            height=5.0,
            draw=draw_timeline,
        ),
        Picture(
            title="Imbalance against what the plans move",
            caption="Towards the lower left is better. One point per planner and budget; bars: "
            "range over seeds. Copies and bytes are means per plan over all layers.",
            height=3.9,
            draw=draw_pareto,
        ),
        Picture(
            title="Expert load, sorted, layer by layer",
            caption="Tokens of each expert over the mean expert of its layer, scored windows; "
            "experts without any token are not drawn.",
            height=3.9,
            draw=draw_expert_load,
        ),
        Picture(
            title="How often imbalance is how bad",
            caption="Share of all (batch, layer) pairs with at most this imbalance, fixed split. "
            "Further left and steeper is better.",
            height=3.7,
            draw=draw_distribution,
        ),
    ]
    return [*found, *_further_pictures(comparison)]


def _further_pictures(comparison: Comparison) -> list[Picture]:
    """Those that need several batch sizes, or routing by token."""
    found = []
    if len(comparison.settings.batch_sizes) > 1 and comparison.batch_of(comparison.runs[0]):
        found.append(
            Picture(
                title="Imbalance against batch size",
                caption="Small batches are noisy: no placement can be even for a few tokens. "
                "Left: fixed split; right: shares solved for every batch.",
                height=3.9,
                draw=draw_batch_sizes,
            )
        )
    if any(run.traffic for run in comparison.runs):
        found.append(
            Picture(
                title="Bytes from rank to rank",
                caption="Hidden states sent for experts, summed over scored windows and layers; "
                "the way back is the transpose. The diagonal (a rank's own tokens) is left out.",
                height=3.4,
                draw=draw_rank_bytes,
            )
        )
    return found


def drawn(text: str) -> str:
    """Text as matplotlib shows it unchanged: a dollar sign would begin a formula."""
    return printable(text).replace("$", r"\$")


def headline_runs(comparison: Comparison) -> list[Run]:
    """One run per planner: first seed, without a budget or else with the last of the budgets."""
    found: dict[str, Run] = {}
    for (planner, _), runs in comparison.groups.items():
        if planner not in found or found[planner].budget != "none":
            found[planner] = runs[0]
    return list(found.values())


def mapped_runs(comparison: Comparison) -> list[Run]:
    """Those with a heat map: the linear placement and the first planners."""
    return headline_runs(comparison)[: _MOST_MAPS + 1]


def run_look(comparison: Comparison, run: Run) -> dict[str, Any]:
    """The line style of a run, the same in all pictures."""
    if run.planner == REFERENCE:
        return {"color": REFERENCE_COLOUR, "marker": "", "linestyle": (0, (1, 1.5))}
    names = [name for name, _ in comparison.groups if name != REFERENCE]
    return look(list(dict.fromkeys(names)).index(run.planner))


def draw_heat_maps(figure: Any, comparison: Comparison) -> None:
    """Rank x window at one layer, a row per run."""
    runs = mapped_runs(comparison)
    row = comparison.shown_layer
    levels = [run.rank_levels[:, row].T for run in runs]
    off = max(0.05, *(float(level.max()) - 1 for level in levels))
    axes = figure.subplots(len(runs), 1, sharex=True, squeeze=False)[:, 0]
    for axis, run, level in zip(axes, runs, levels, strict=True):
        image = axis.imshow(
            level,
            aspect="auto",
            cmap=AROUND_ONE,
            vmin=1 - off,
            vmax=1 + off,
            interpolation="nearest",
        )
        peak = level.max(0).mean()
        before = "before: " if run.planner == REFERENCE else ""
        title = f"{before}{run.label} - fullest rank {peak:.2f} on average"
        axis.set_title(drawn(title), loc="left")
        axis.set_ylabel("rank")
        axis.grid(False)
        _whole_numbers(axis.yaxis)
    _whole_numbers(axes[-1].xaxis)
    axes[-1].set_xlabel("scored window")
    bar = figure.colorbar(image, ax=list(axes), fraction=0.03, pad=0.01)
    bar.set_label("rank level / mean")
    bar.ax.set_ylim(max(0.0, 1 - off), 1 + off)


def draw_timeline(figure: Any, comparison: Comparison) -> None:
    """Imbalance by window, and the copies of each plan below."""
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1.3))
    runs = headline_runs(comparison)
    planners = [run for run in runs if run.planner != REFERENCE]
    for run in runs:
        values = run.window_imbalance(comparison.batch_of(run))
        looks = run_look(comparison, run)
        upper.plot(values, label=drawn(run.label), markersize=3.5, linewidth=1.4, **looks)
    width = 0.8 / max(len(planners), 1)
    for index, run in enumerate(planners):
        plans = [plan for plan in run.plans if plan.num_copies]
        at = np.array([plan.window for plan in plans]) + (index + 0.5) * width - 0.4
        colour = run_look(comparison, run)["color"]
        lower.bar(at, [plan.num_copies for plan in plans], width=width, color=colour)
    moved = [plan.num_copies for run in planners for plan in run.plans if plan.num_copies]
    if not moved:
        lower.text(0.5, 0.5, "no plan moved anything", transform=lower.transAxes, ha="center")
        lower.set_yticks([])
    is_log = len(moved) > 1 and max(moved) > 20 * min(moved)
    if is_log:
        lower.set_yscale("log")
        _log_ticks(lower.yaxis)
    upper.set_ylabel("imbalance (fullest / mean)")
    lower.set_ylabel("experts copied" + (" (log)" if is_log else ""))
    lower.set_xlabel("scored window")
    _whole_numbers(lower.xaxis)
    _mark_domains(upper, comparison, runs[0].seed)
    upper.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _mark_domains(axis: Any, comparison: Comparison, seed: int) -> None:
    """Shades every other stretch of windows of one domain and names the long ones."""
    labels = comparison.window_labels[seed]
    starts = [i for i in range(len(labels)) if i == 0 or labels[i] != labels[i - 1]]
    if labels[0] is None or len(starts) < 2:
        return
    for number, (start, stop) in enumerate(zip(starts, [*starts[1:], len(labels)], strict=True)):
        if number % 2:
            axis.axvspan(start - 0.5, stop - 0.5, color="#000000", alpha=0.05, linewidth=0)
        name = str(labels[start])
        room = int(_WIDTH_CHARACTERS * (stop - start) / len(labels))
        if room >= min(len(name), _LEAST_CHARACTERS):
            axis.text(
                (start + stop - 1) / 2,
                1.01,
                drawn(name if len(name) <= room else f"{name[: room - 2]}.."),
                transform=axis.get_xaxis_transform(),
                ha="center",
                fontsize=8,
                color="#444444",
            )


def draw_pareto(figure: Any, comparison: Comparison) -> None:
    """Imbalance against copies and against bytes per plan."""
    axes = figure.subplots(1, 2, sharey=True)
    balances = {
        row.label: row
        for row in balance_rows(comparison)
        if row.split == FIXED and row.batch_size == comparison.batch_of(comparison.runs[0])
    }
    costs = {row.label: row for row in cost_rows(comparison)}
    names = list(dict.fromkeys(planner for planner, _ in comparison.groups))
    scale, unit = _byte_unit(max(row.num_bytes.mean for row in costs.values()))
    for name in names:
        group = [runs[0].label for (p, _), runs in comparison.groups.items() if p == name]
        group.sort(key=lambda label: costs[label].copies.mean)
        looks = run_look(comparison, next(r for r in comparison.runs if r.planner == name))
        looks = looks | {"marker": looks["marker"] or "x", "label": drawn(name)}
        y = [balances[label].mean for label in group]
        errors = None
        if len(comparison.seeds) > 1:
            errors = [[v.mean - v.low for v in y], [v.high - v.mean for v in y]]
        for axis, x in (
            (axes[0], [costs[label].copies.mean for label in group]),
            (axes[1], [costs[label].num_bytes.mean / scale for label in group]),
        ):
            axis.errorbar(x, [v.mean for v in y], yerr=errors, markersize=6, capsize=2, **looks)
    axes[0].set_xlabel("experts copied per plan")
    axes[1].set_xlabel(f"{unit} copied per plan")
    axes[0].set_ylabel("imbalance (fullest / mean)")
    for axis in axes:
        axis.set_xlim(left=min(0.0, -0.03 * axis.get_xlim()[1]))
        axis.margins(y=0.15)
    axes[1].legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))


def draw_expert_load(figure: Any, comparison: Comparison) -> None:
    """Sorted load over mean, one line per layer, on a log axis."""
    axis = figure.subplots()
    matplotlib = load("matplotlib")
    colours = matplotlib.colormaps[MAP]
    load_of = comparison.expert_load.astype(np.float64)
    layers = len(load_of)
    for row in range(layers):
        mean = load_of[row].mean()
        if mean > 0:
            values = np.sort(load_of[row])[::-1] / mean
            values = values[values > 0]
            colour = colours(0.9 * row / max(layers - 1, 1))
            axis.plot(np.arange(1, len(values) + 1), values, color=colour, linewidth=1.0)
    axis.axhline(1.0, color="#444444", linewidth=0.8, linestyle="--")
    axis.set_yscale("log")
    _log_ticks(axis.yaxis)
    axis.set_xlabel("expert, hottest first")
    axis.set_ylabel("tokens / mean expert (log)")
    ids = comparison.layer_ids
    norm = matplotlib.colors.Normalize(0, layers / 0.9)
    scalar = load("matplotlib.cm").ScalarMappable(norm=norm, cmap=MAP)
    bar = figure.colorbar(scalar, ax=axis, fraction=0.03, pad=0.01)
    ticks = sorted({0, layers // 2, layers - 1})
    bar.ax.set_ylim(0, max(layers - 1, 1))
    bar.set_ticks(ticks, labels=[str(ids[tick]) for tick in ticks])
    bar.set_label("layer")


def draw_distribution(figure: Any, comparison: Comparison) -> None:
    """Cumulative distribution of imbalance over batches and layers."""
    axis = figure.subplots()
    for shown in headline_runs(comparison):
        size = comparison.batch_of(shown)
        runs = comparison.groups[shown.planner, shown.budget]
        values = np.concatenate([run.levels[FIXED, size].imbalance.ravel() for run in runs])
        values = np.sort(values)
        looks = run_look(comparison, shown) | {"marker": ""}
        share = np.arange(1, len(values) + 1) / len(values)
        looks |= {"label": drawn(shown.label), "drawstyle": "steps-post"}
        axis.plot(values, share, linewidth=1.6, **looks)
    axis.set_xlabel("imbalance (fullest / mean)")
    axis.set_ylabel("share of batches x layers")
    axis.set_ylim(0, 1.01)
    axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))


def draw_batch_sizes(figure: Any, comparison: Comparison) -> None:
    """Mean imbalance against batch size, for both splits where both were scored."""
    rows = balance_rows(comparison)
    splits = list(dict.fromkeys(row.split for row in rows))
    axes = figure.subplots(1, len(splits), sharey=True, squeeze=False)[0]
    for axis, split in zip(axes, splits, strict=True):
        for run in headline_runs(comparison):
            mine: list[BalanceRow] = [
                row for row in rows if row.split == split and row.label == run.label
            ]
            looks = run_look(comparison, run)
            x = [row.batch_size for row in mine]
            axis.plot(x, [row.mean.mean for row in mine], label=drawn(run.label), **looks)
        axis.set_xscale("log", base=2)
        axis.set_xticks(comparison.settings.batch_sizes)
        axis.xaxis.set_major_formatter(load("matplotlib.ticker").FormatStrFormatter("%d"))
        axis.set_xlabel("tokens per batch")
        axis.set_title("fixed split" if split == FIXED else "split per batch", loc="left")
    axes[0].set_ylabel("imbalance (fullest / mean)")
    axes[-1].legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))


def draw_rank_bytes(figure: Any, comparison: Comparison) -> None:
    """Source x destination bytes, one map for each of the first runs."""
    runs = [run for run in mapped_runs(comparison) if run.traffic]
    size = comparison.settings.token_bytes
    sent = [np.sum([t.sent for t in run.traffic], axis=0) * size for run in runs]
    for matrix in sent:
        np.fill_diagonal(matrix, np.nan)
    largest = max([float(np.nanmax(m)) for m in sent if np.isfinite(m).any()], default=1.0)
    scale, unit = _byte_unit(largest)
    axes = figure.subplots(1, len(runs), squeeze=False)[0]
    for axis, run, matrix in zip(axes, runs, sent, strict=True):
        image = axis.imshow(matrix / scale, cmap=MAP, vmin=0, vmax=largest / scale)
        axis.set_title(drawn(run.label), loc="left", fontsize=9)
        axis.set_xlabel("to rank")
        axis.grid(False)
        _whole_numbers(axis.xaxis)
        _whole_numbers(axis.yaxis)
    axes[0].set_ylabel("from rank")
    bar = figure.colorbar(image, ax=list(axes), fraction=0.03, pad=0.01, shrink=0.7)
    bar.set_label(unit)


def _log_ticks(axis: Any) -> None:
    """Ticks at 1, 2, 5, 10, ... written as plain numbers."""
    ticker = load("matplotlib.ticker")
    axis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(ticker.FormatStrFormatter("%g"))
    axis.set_minor_locator(ticker.NullLocator())


def _whole_numbers(axis: Any) -> None:
    axis.set_major_locator(load("matplotlib.ticker").MaxNLocator(integer=True, nbins=9))


def _byte_unit(largest: float) -> tuple[float, str]:
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if largest >= scale:
            return scale, unit
    return 1.0, "bytes"


__all__ = ["COLOURS", "Picture", "pictures"]
