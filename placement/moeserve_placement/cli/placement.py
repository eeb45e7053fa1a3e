"""``placement plan``, ``placement compare`` and ``placement explain``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from moeserve_placement.cli import placement_options as options
from moeserve_placement.cli.placement_tables import print_comparison
from moeserve_placement.load import LoadHistory
from moeserve_placement.placement import Placement, PlacementError
from moeserve_placement.placement_npz import load_npz, save_npz
from moeserve_placement.plan import Plan
from moeserve_placement.replay.play import compare as compare_planners
from moeserve_placement.replay.play import observe
from moeserve_placement.replay.results_json import save_json, to_dict
from moeserve_placement.replay.schedule import all_windows
from moeserve_placement.replay.settings import ORDERS, STARTS, ReplaySettings
from moeserve_placement.report.explain import explain as explain_plan
from moeserve_placement.report.html import check_folder, check_report, save_report
from moeserve_placement.report.plan_file import PlanFile, load_plan, save_plan
from moeserve_placement.report.words import bytes_words, topology_words
from moeserve_placement.slot_table import Floats
from moeserve_placement.topology import Topology
from moeserve_placement.traces.convert import summary
from moeserve_placement.traces.detect import open_any, open_trace
from moeserve_placement.traces.options import ReadOptions
from moeserve_placement.traces.trace import CountTrace, RoutingTrace

_PATH = click.Path(path_type=Path)
_READ_OPTIONS = [
    click.option("--num-experts", type=int, help="Logical experts, where the file lacks them."),
    click.option("--top-k", type=int, help="Experts per token (ESFT logs)."),
    click.option("--select", help="Only the arrays of a raw npz whose name starts so."),
]


def _read_options(command: Any) -> Any:
    for option in reversed(_READ_OPTIONS):
        command = option(command)
    return command


def _open(
    path: Path, num_experts: int | None, top_k: int | None, select: str | None
) -> RoutingTrace | CountTrace:
    return open_trace(path, ReadOptions(num_experts=num_experts, top_k=top_k, select=select))


@click.command()
@click.argument("trace", type=_PATH)
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
@click.option("--json", "json_path", type=_PATH, help="Write results as JSON; - prints them.")
@click.option(
    "--report",
    "reports",
    type=_PATH,
    multiple=True,
    help="Write a self-contained .html or .png report (needs the extra 'plot').",
)
@_read_options
def compare(trace: Path, json_path: Path | None, reports: tuple[Path, ...], **given: Any) -> None:
    """Play TRACE against planners: plan on the past, score on what comes next.

    TRACE is a file of any known format. The linear placement is always shown beside the planners.
    """
    check_report(reports)
    if json_path is not None:
        check_folder("json", json_path)
    read = {name: given.pop(name) for name in ("num_experts", "top_k", "select")}
    machine = ("ranks", "slots", "nodes", "speeds", "gone", "expert_bytes")
    topology = options.make_topology(**{name: given.pop(name) for name in machine})
    planners, seeds = options.planners(given.pop("planners")), options.seeds(given.pop("seeds"))
    budget = given.pop("budget")
    settings = ReplaySettings(
        batch_sizes=options.integers("batch", given.pop("batch")),
        token_bytes=options.num_bytes("token_bytes", given.pop("token_bytes")),
        **given,
    )
    data = _open(trace, **read)
    with _progress() as bar:
        task = bar.add_task("replay", total=None)
        comparison = compare_planners(
            data,
            planners,
            topology=topology,
            settings=settings,
            budgets=options.budgets(budget, data.num_layers),
            seeds=seeds,
            name=trace.name,
            facts={"content": summary(data)},
            progress=lambda done, total, text: _advance(bar, task, done, total, text),
        )
    if json_path is not None and str(json_path) == "-":
        click.echo(json.dumps(to_dict(comparison), allow_nan=False))
        return
    print_comparison(comparison, Console())
    if json_path is not None:
        save_json(comparison, json_path)
        click.echo(f"{json_path}: results")
    for path in reports:
        save_report(comparison, path)
        click.echo(f"{path}: report")


@click.command()
@click.argument("trace", type=_PATH)
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
@click.option(
    "--current", type=_PATH, help="Placement in place, of any format; none: from nothing."
)
@click.option(
    "--budget",
    default="none",
    show_default=True,
    help="Copies (64 or 6/layer) or bytes (1GB); only with --current.",
)
@click.option("--out", type=_PATH, help="Write the placement: .json, or .npz (with its shares).")
@click.option("--plan", "plan_path", type=_PATH, help="Write the plan: moves, sizes, load (JSON).")
@_read_options
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
    for name, path in (("out", out), ("plan", plan_path)):
        if path is not None:
            check_folder(name, path)
    read = {name: given.pop(name) for name in ("num_experts", "top_k", "select")}
    topology = options.make_topology(**given)
    specs = options.planners(planner)
    if len(specs) != 1:
        raise PlacementError(f"planner = {planner!r}: must be one planner")
    data = _open(trace, **read)
    limits = options.budgets(budget, data.num_layers)
    if len(limits) != 1:
        raise PlacementError(f"budget = {budget!r}: must be one budget")
    seen = LoadHistory(data.layer_ids, data.num_experts, window=history)
    for part in all_windows(data, window, mixed=order == "mixed"):
        observe(seen, part, topology)
    now = None if current is None else _open_placement(current, topology)
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
@click.argument("plan", type=_PATH)
@click.option("--layer", "layers", type=int, multiple=True, help="Only these layers.")
@click.option("--limit", type=int, help="At most so many sentences.")
def explain(plan: Path, layers: tuple[int, ...], limit: int | None) -> None:
    """Say in words why each expert moved. PLAN is a file that 'plan --plan' wrote."""
    if limit is not None and limit < 1:
        raise PlacementError(f"limit = {limit}: must be at least 1")
    sentences = list(explain_plan(load_plan(plan), layers=set(layers) or None))
    shown = sentences if limit is None else sentences[: limit + 1]
    for sentence in shown:
        click.echo(sentence)
    if len(shown) < len(sentences):
        click.echo(f"... and {len(sentences) - len(shown)} more")


def _progress() -> Progress:
    """A bar on the error stream, so that results can be piped; none where that is no terminal."""
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def _advance(bar: Progress, task: TaskID, done: int, total: int, text: str) -> None:
    bar.update(task, completed=done, total=total, description=text)


def _open_placement(path: Path, topology: Topology) -> Placement:
    if path.suffix == ".npz":
        return load_npz(path)[0]
    found = open_any(path, ReadOptions(num_ranks=topology.num_ranks))
    if not isinstance(found, Placement):
        raise PlacementError(f"{path}: is a trace, not a placement")
    return found


def _save_placement(path: Path, plan: Plan) -> None:
    if path.suffix == ".npz":
        order = np.argsort(plan.layer_ids)
        save_npz(path, plan.placement, shares=None if plan.shares is None else plan.shares[order])
    elif path.suffix == ".json":
        plan.placement.save(path)
    else:
        raise PlacementError(f"{path}: the name of a placement must end in .json or .npz")


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
