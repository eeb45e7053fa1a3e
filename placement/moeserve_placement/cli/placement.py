"""``placement plan``, ``placement compare`` and ``placement explain``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np
from click.core import ParameterSource
from rich.console import Console

from moeserve_placement.cli import placement_options as options
from moeserve_placement.cli.placement_tables import print_comparison
from moeserve_placement.cli.shared import (
    PATH,
    check_least,
    check_pairs,
    check_windows,
    print_json,
    progress_bar,
    read_options,
    take_read_options,
)
from moeserve_placement.load import LoadHistory
from moeserve_placement.placement import Placement, PlacementError
from moeserve_placement.plan import Plan
from moeserve_placement.planners.base import Budget
from moeserve_placement.replay.play import compare as compare_planners
from moeserve_placement.replay.play import observe
from moeserve_placement.replay.results_json import save_json, to_dict
from moeserve_placement.replay.schedule import all_windows
from moeserve_placement.replay.settings import ORDERS, STARTS, ReplaySettings
from moeserve_placement.report.explain import explain as explain_plan
from moeserve_placement.report.html import check_folder, check_report, save_report
from moeserve_placement.report.plan_file import PlanFile, load_plan, save_plan
from moeserve_placement.report.words import bytes_words, printable, topology_words
from moeserve_placement.slot_table import Floats
from moeserve_placement.topology import Topology
from moeserve_placement.traces.convert import summary
from moeserve_placement.traces.detect import open_any, open_trace
from moeserve_placement.traces.files import write_text
from moeserve_placement.traces.options import ReadOptions
from moeserve_placement.traces.placement_npz import save_npz
from moeserve_placement.traces.trace import CountTrace, RoutingTrace

_PLACEMENTS = (".json", ".npz")
_NOT_WITH_HOLDOUT = ("interval", "warmup", "history")


@click.command()
@click.argument("trace", type=PATH)
@click.option(
    "--planners",
    default="eplb,flashlb,scenario",
    show_default=True,
    help="Names separated by commas; options as scenario:split=batch:power=16.",
)
@options.topology_options
@click.option(
    "--batch",
    default="2048",
    show_default=True,
    help="Tokens that run together in a step; several separated by commas.",
)
@click.option(
    "--window", type=int, help="Tokens between two observations.  [default: 2048 or more]"
)
@click.option(
    "--interval",
    type=int,
    default=1,
    show_default=True,
    help="Windows between plans; 0: plan once.",
)
@click.option("--warmup", type=int, help="Windows only observed at first.  [default: --interval]")
@click.option(
    "--history",
    type=int,
    default=16,
    show_default=True,
    help="Recent windows that EPLB and the like average over.",
)
@click.option(
    "--budget",
    default="none",
    show_default=True,
    help="Per plan: none, copies (64 or 6/layer) or bytes (1GB); several for a sweep.",
)
@click.option(
    "--order",
    type=click.Choice(ORDERS),
    default="recorded",
    show_default=True,
    help="Of the sequences; holdout: plan on the first half of each domain.",
)
@click.option("--leave-out", metavar="DOMAIN", help="Keep a domain out of planning (holdout).")
@click.option("--seeds", default="0", show_default=True, help="Of the order, e.g. 0,1,2.")
@click.option(
    "--start",
    type=click.Choice(STARTS),
    default="planned",
    show_default=True,
    help="What is in place at first: the first plan, or the linear placement.",
)
@click.option(
    "--batch-split/--no-batch-split",
    default=True,
    show_default=True,
    help="Score also with token shares solved for every batch.",
)
@click.option(
    "--token-bytes",
    default="4096",
    show_default=True,
    help="Bytes of a token's hidden state on the wire.",
)
@click.option("--json", "json_path", type=PATH, help="Write results as JSON; - prints them.")
@click.option(
    "--report",
    "reports",
    type=PATH,
    multiple=True,
    help="Write a self-contained .html or .png report (needs the extra 'plot').",
)
@read_options
def compare(trace: Path, json_path: Path | None, reports: tuple[Path, ...], **given: Any) -> None:
    """Play TRACE against planners: plan on the past, score on what comes next.

    TRACE is a file of any known format. The linear placement is always shown beside the planners.
    """
    check_report(reports)
    if json_path is not None:
        check_folder("json", json_path)
    reading = take_read_options(given)
    machine = ("ranks", "slots", "nodes", "speeds", "gone", "expert_bytes")
    topology = options.make_topology(**{name: given.pop(name) for name in machine})
    planners, seeds = options.planners(given.pop("planners")), options.seeds(given.pop("seeds"))
    budget = given.pop("budget")
    settings = ReplaySettings(
        batch_sizes=options.integers("batch", given.pop("batch")),
        token_bytes=options.num_bytes("token_bytes", given.pop("token_bytes")),
        **given,
    )
    _check_given(settings)
    data = open_trace(trace, reading)
    _check_load_size(data, settings.window_tokens, topology, reading)
    with progress_bar() as report:
        comparison = compare_planners(
            data,
            planners,
            topology=topology,
            settings=settings,
            budgets=options.budgets(budget, data.num_layers),
            seeds=seeds,
            name=trace.name,
            facts={"content": summary(data)},
            progress=lambda done, total, text: report(text, done, total),
        )
    only_json = str(json_path) == "-"
    if not only_json:
        print_comparison(comparison, Console())
    if json_path is not None and not only_json:
        save_json(comparison, json_path)
        click.echo(f"{json_path}: results")
    for path in reports:
        save_report(comparison, path)
        click.echo(f"{path}: report", err=only_json)
    if only_json:
        print_json(to_dict(comparison), indent=None)


@click.command()
@click.argument("trace", type=PATH)
@click.option(
    "--planner",
    default="scenario",
    show_default=True,
    help="Name, with options as scenario:split=batch.",
)
@options.topology_options
@click.option("--window", type=int, default=2048, show_default=True, help="Tokens per window.")
@click.option(
    "--history",
    type=int,
    default=16,
    show_default=True,
    help="Recent windows that EPLB and the like average over.",
)
@click.option(
    "--order",
    type=click.Choice(["mixed", "recorded"]),
    default="mixed",
    show_default=True,
    help="Mixed: TRACE is a sample of what may come at any time; recorded: its end counts most.",
)
@click.option("--current", type=PATH, help="Placement in place, of any format; none: from nothing.")
@click.option(
    "--budget",
    default="none",
    show_default=True,
    help="Copies (64 or 6/layer) or bytes (1GB); only with --current.",
)
@click.option("--out", type=PATH, help="Write the placement: .json, or .npz (with its shares).")
@click.option("--plan", "plan_path", type=PATH, help="Write the plan: moves, sizes, load (JSON).")
@read_options
def plan(
    trace: Path,
    planner: str,
    window: int,
    history: int,
    order: str,
    current: Path | None,
    budget: str,
    out: Path | None,
    plan_path: Path | None,
    **given: Any,
) -> None:
    """Make a placement for the load of TRACE, and the moves to it from --current.

    Without --out the placement is printed as JSON.
    """
    _check_targets(out, plan_path)
    check_least("history", history)
    check_least("window", window)
    reading = take_read_options(given)
    topology = options.make_topology(**given)
    specs = options.planners(planner)
    if len(specs) != 1:
        raise PlacementError(f"planner = {planner!r}: must be one planner")
    data = open_trace(trace, reading)
    _check_load_size(data, window, topology, reading)
    limits = options.budgets(budget, data.num_layers)
    if len(limits) != 1:
        raise PlacementError(f"budget = {budget!r}: must be one budget")
    if current is None and limits[0].budget != Budget():
        raise PlacementError(
            f"budget = {budget!r}: goes with --current only, from nothing every expert is copied"
        )
    seen = LoadHistory(data.layer_ids, data.num_experts, window=history)
    for part in all_windows(data, window, mixed=order == "mixed"):
        observe(seen, part, topology)
    now = None if current is None else _open_placement(current, topology, reading)
    result = specs[0].make().plan(seen, topology, current=now, budget=limits[0].budget)
    if plan_path is not None:
        save_plan(plan_path, PlanFile.of(result, topology, _load(seen)))
    if out is None and plan_path is None:
        click.echo(result.placement.to_json(), nl=False)
        return
    click.echo(f"{result.planner} for {topology_words(topology)}: {result.reason}")
    click.echo(_moves_words(result))
    if out is not None:
        _save_placement(out, result)
        click.echo(f"{out}: placement")
    if plan_path is not None:
        click.echo(f"{plan_path}: plan, to read with: moeserve placement explain {plan_path}")


@click.command()
@click.argument("plan", type=PATH)
@click.option("--layer", "layers", type=int, multiple=True, help="Only these layers.")
@click.option("--limit", type=int, help="At most so many sentences.")
def explain(plan: Path, layers: tuple[int, ...], limit: int | None) -> None:
    """Say in words why each expert moved. PLAN is a file that 'plan --plan' wrote."""
    if limit is not None and limit < 1:
        raise PlacementError(f"limit = {limit}: must be at least 1")
    sentences = list(explain_plan(load_plan(plan), layers=set(layers) or None))
    shown = sentences if limit is None else sentences[: limit + 1]
    for sentence in shown:
        click.echo(printable(sentence))
    if len(shown) < len(sentences):
        click.echo(f"... and {len(sentences) - len(shown)} more")


def _check_given(settings: ReplaySettings) -> None:
    """Refuses options that were given and would have no effect."""
    context = click.get_current_context()
    for name in _NOT_WITH_HOLDOUT if settings.order == "holdout" else ():
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise PlacementError(
                f"{name} = {getattr(settings, name)}: has no effect with order = 'holdout', which "
                "plans once on all windows of the first halves; leave it out"
            )


def _check_load_size(
    data: RoutingTrace | CountTrace, window: int, topology: Topology, reading: ReadOptions
) -> None:
    """Refuses traces whose counts, or whose pairs of experts, would not fit in memory."""
    check_windows(data, window, reading)
    if topology.num_nodes > 1:
        check_pairs(data, num_tables=data.num_layers)


def _check_targets(out: Path | None, plan_path: Path | None) -> None:
    """Fails before any work where a file could not be written at the end."""
    for name, path in (("out", out), ("plan", plan_path)):
        if path is not None:
            check_folder(name, path)
    if out is not None and out.suffix not in _PLACEMENTS:
        raise PlacementError(f"out = {out}: the name must end in {' or '.join(_PLACEMENTS)}")


def _open_placement(path: Path, topology: Topology, reading: ReadOptions) -> Placement:
    found = open_any(path, replace(reading, num_ranks=topology.num_ranks))
    if not isinstance(found, Placement):
        raise PlacementError(f"{path}: is a trace, not a placement")
    return found


def _save_placement(path: Path, plan: Plan) -> None:
    if path.suffix == ".npz":
        order = np.argsort(plan.layer_ids)
        save_npz(path, plan.placement, shares=None if plan.shares is None else plan.shares[order])
    else:
        write_text(path, plan.placement.to_json())


def _load(history: LoadHistory) -> Floats:
    """The load that forecasts are made for: [num_layers, num_experts], each layer sums to 1."""
    return history.mean if history.is_empty else history.scenarios().mean


def _moves_words(plan: Plan) -> str:
    if plan.current is None:
        return "from nothing: no moves"
    layers = len({move.layer for move in plan.moves})
    return (
        f"{len(plan.moves)} moves in {layers} layers: {plan.num_copies} copies, "
        f"{bytes_words(plan.num_bytes)}"
    )
