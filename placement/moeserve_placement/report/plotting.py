"""Figures without pyplot: matplotlib loaded when it is needed, one style for all.

Colours are Okabe and Ito's eight, which most colour-blind people tell apart; every line has its own
marker and dash as well. Heat maps use cividis, which is even in lightness, and purple to orange
where the middle means something.
"""

from __future__ import annotations

import importlib
import io
from typing import Any

from moeserve_placement.placement import PlacementError

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#B0A000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
DASHES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)), (0, (7, 2)))
REFERENCE_COLOUR = "#767676"
MAP = "cividis"
AROUND_ONE = "PuOr_r"
_RC = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "svg.hashsalt": "moeserve",
    "figure.facecolor": "white",
}


def load(module: str) -> Any:
    """A matplotlib module.

    Raises:
        PlacementError: matplotlib is not installed; the text names the extra.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise PlacementError(
            "report: needs matplotlib; install it with: pip install 'moeserve[plot]'"
        ) from error


def style() -> Any:
    """Context in which figures have our style."""
    return load("matplotlib").rc_context(_RC)


def new_figure(width: float, height: float) -> Any:
    """An empty figure, sizes in inches."""
    return load("matplotlib.figure").Figure(figsize=(width, height), layout="constrained")


def svg(figure: Any) -> bytes:
    """The figure as SVG, the same bytes for the same figure."""
    out = io.BytesIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()


def look(index: int) -> dict[str, Any]:
    """Colour, marker and dash of the planner at ``index``."""
    at = index % len(COLOURS)
    return {"color": COLOURS[at], "marker": MARKERS[at], "linestyle": DASHES[at]}
