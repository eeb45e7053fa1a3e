"""``placement paging``: the study of expert caches, as a table or JSON."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from moeserve_placement.cli.shared import (
    PATH,
    print_json,
    print_line,
    progress_bar,
    read_options,
    take_read_options,
)
from moeserve_placement.paging.prefetch import PrefetchRule
from moeserve_placement.paging.stall import StallModel
from moeserve_placement.paging.study import (
    POLICIES,
    PREDICTORS,
    StudyOptions,
    StudyRow,
    default_policies,
    left_out_predictors,
    run_study,
)
from moeserve_placement.traces import open_trace
from moeserve_placement.traces.trace import RoutingTrace

_STALL, _RULE = StallModel(), PrefetchRule()


class _List(click.ParamType[Any]):
    """Values separated by commas."""

    def __init__(self, item: Callable[[str], Any], name: str) -> None:
        self._item, self.name = item, name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """A tuple of the items."""
        if isinstance(value, tuple):
            return value
        try:
            return tuple(self._item(part.strip()) for part in value.split(",") if part.strip())
        except ValueError:
            self.fail(f"{value!r} is not a list of {self.name}, separated by commas", param, ctx)


def _integer(text: str) -> int:
    if not re.fullmatch("[+-]?[0-9]{1,18}", text):
        raise ValueError
    return int(text)


_INTEGERS = _List(_integer, "INTEGERS")
_NAMES = _List(str, "NAMES")


@click.command()
@click.argument("trace", type=PATH)
@click.option("--capacity", "capacities", type=_INTEGERS, required=True, help="Experts per layer.")
@click.option("--batch", "batches", type=_INTEGERS, default="1,8,32", show_default=True)
@click.option("--policies", type=_NAMES, help=f"Of {', '.join(POLICIES)}. Default: all that can.")
@click.option("--predictors", type=_NAMES, help=f"Of {', '.join(PREDICTORS)}.")
@click.option("--horizon", default=4, show_default=True, help="Layer steps that prefetch sees.")
@click.option(
    "--bytes-per-expert", default=_STALL.bytes_per_expert, show_default=True, help="Transfer size."
)
@click.option("--bandwidth-gb-per-s", default=_STALL.bandwidth_gb_per_s, show_default=True)
@click.option(
    "--parts-per-expert",
    default=_STALL.parts_per_expert,
    show_default=True,
    help="Copies that an expert travels in; between two of a prefetch, a miss goes first.",
)
@click.option("--compute-us-per-layer", default=_STALL.compute_us_per_layer, show_default=True)
@click.option(
    "--pollution",
    default=_RULE.pollution,
    show_default=True,
    help="Chance that a useless prefetch throws out an expert that is missed later.",
)
@click.option("--shared-pool/--no-shared-pool", default=True, help="Also one pool over all layers.")
@click.option("--train-share", default=0.5, show_default=True, help="Sequences to learn from.")
@click.option("--seed", default=0, show_default=True, help="Of the split and of random eviction.")
@read_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def paging(trace: Path, as_json: bool, **settings: Any) -> None:
    """Play TRACE against expert caches: hit rates, stalls, and how far from the optimum.

    Learns on a random part of the sequences and scores the others. Every layer has a cache of
    --capacity experts; --batch sequences are decoded together.
    """
    data = open_trace(trace, take_read_options(settings))
    if not isinstance(data, RoutingTrace):
        raise ValueError(
            f"{trace}: holds counts per window; paging needs the experts of each token"
        )
    options = _options(data, settings)
    with progress_bar() as report:
        rows = run_study(data, options, progress=report)
    if as_json:
        print_json(_document(trace, options, rows))
        return
    _print(_console(), data, options, rows)


def _console() -> Console:
    """Standard output, at least as wide as the table: numbers cut short would be worthless."""
    console = Console()
    return console if console.width >= _TABLE_WIDTH else Console(width=_TABLE_WIDTH)


def _options(data: RoutingTrace, settings: dict[str, Any]) -> StudyOptions:
    stall = StallModel(
        bytes_per_expert=settings.pop("bytes_per_expert"),
        bandwidth_gb_per_s=settings.pop("bandwidth_gb_per_s"),
        parts_per_expert=settings.pop("parts_per_expert"),
        compute_us_per_layer=settings.pop("compute_us_per_layer"),
    )
    rule = PrefetchRule(pollution=settings.pop("pollution"))
    policies = settings.pop("policies") or _policies_that_can(data.num_experts)
    predictors = settings.pop("predictors")
    options = StudyOptions(
        stall=stall, rule=rule, policies=policies, predictors=predictors or PREDICTORS, **settings
    )
    return replace(options, predictors=_predictors_that_can(data, options))


def _predictors_that_can(data: RoutingTrace, options: StudyOptions) -> tuple[str, ...]:
    """Those of the options that can run on the trace; says on stderr which are left out."""
    reasons = left_out_predictors(data, options)
    for name, reason in reasons.items():
        click.echo(f"left out: {name}, {reason}", err=True)
    return tuple(name for name in options.predictors if name not in reasons)


def _policies_that_can(num_experts: int) -> tuple[str, ...]:
    """Policies for this many experts; says on stderr which are left out."""
    policies = default_policies(num_experts)
    for name in POLICIES:
        if name not in policies:
            click.echo(f"left out: {name}, {num_experts} experts a layer are too many", err=True)
    return policies


def _document(trace: Path, options: StudyOptions, rows: list[StudyRow]) -> dict[str, Any]:
    stall = options.stall
    return {
        "trace": str(trace),
        "train_share": options.train_share,
        "seed": options.seed,
        "horizon": options.horizon,
        "pollution": options.rule.pollution,
        "bytes_per_expert": stall.bytes_per_expert,
        "bandwidth_gb_per_s": stall.bandwidth_gb_per_s,
        "parts_per_expert": stall.parts_per_expert,
        "compute_us_per_layer": stall.compute_us_per_layer,
        "rows": [row.to_dict() for row in rows],
    }


def _print(
    console: Console, data: RoutingTrace, options: StudyOptions, rows: list[StudyRow]
) -> None:
    stall = options.stall
    scored = rows[0].result.num_tokens
    lines = (
        f"{data.num_experts} experts, top {data.top_k}, {data.num_layers} layers; "
        f"{scored} tokens scored, {data.num_tokens - scored} learned from",
        f"an expert takes {stall.transfer_us:.0f} us on the link, "
        f"a layer computes for {stall.compute_us_per_layer:.0f} us",
    )
    for line in lines:
        print_line(console, line)
    for key in dict.fromkeys(_key(row) for row in rows):
        console.print(_table(data, [row for row in rows if _key(row) == key]))
    console.print(_LEGEND, highlight=False, markup=False)


_TABLE_WIDTH = 100
_COLUMNS = ("hits", "gap", "prec", "cover", "stalls", "/LRU", "stall us", "/LRU", "own us")

_LEGEND = (
    "gap: share of the hits between LRU (0%) and Belady's bound (100%, the best eviction without "
    "prefetch). prec: prefetches needed where they aimed; cover: would-be misses that were "
    "prefetched. Stalls and times are per token, /LRU in units of LRU's. own us: the policy's "
    "time in this program, on this machine."
)


def _key(row: StudyRow) -> tuple[int, bool, int]:
    return row.result.batch, row.shared_pool, row.result.capacity


def _table(data: RoutingTrace, rows: list[StudyRow]) -> Table:
    result = rows[0].result
    where = "one pool over all layers" if rows[0].shared_pool else "a cache per layer"
    table = Table(
        title=f"batch {result.batch}, {result.capacity} of {data.num_experts} experts, {where} "
        f"(a layer step needs {result.requests_per_layer_step:.1f})",
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("policy", no_wrap=True, min_width=20)
    for name in _COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*_cells(row))
    return table


def _cells(row: StudyRow) -> list[str]:
    result = row.result
    return [
        result.name,
        f"{result.hit_rate:.3f}",
        _percent(row.gap_closed),
        _percent(result.precision),
        _percent(result.coverage),
        f"{result.stalls_per_token:.2f}",
        _ratio(row.stall_ratio),
        f"{result.stall_us_per_token:.0f}",
        _ratio(row.stall_us_ratio),
        f"{result.policy_us_per_token:.0f}",
    ]


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
