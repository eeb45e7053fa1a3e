"""``trace info``, ``trace synth`` and ``trace convert``: commands for the group ``trace``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from moeserve_placement.cli.shared import (
    PATH,
    check_least,
    check_pairs,
    check_windows,
    print_json,
    print_line,
    read_options,
    take_read_options,
)
from moeserve_placement.report.words import printable
from moeserve_placement.traces.convert import convert as convert_file
from moeserve_placement.traces.convert import summary
from moeserve_placement.traces.detect import FORMATS, open_trace
from moeserve_placement.traces.format import write_trace
from moeserve_placement.traces.info import LayerInfo, TraceInfo, describe
from moeserve_placement.traces.mix import MixSpec, mix_under_clock, poisson_clock, read_clock
from moeserve_placement.traces.synth import KINDS, SynthSpec, synthesize
from moeserve_placement.traces.trace import RoutingTrace, TraceError


@click.command()
@click.argument("trace", type=PATH)
@click.option("--window", type=int, default=2048, help="Tokens per window, for drift.")
@click.option("--top", type=int, help="Experts in the top share; default: top_k.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@read_options
def info(trace: Path, window: int, top: int | None, as_json: bool, **options: Any) -> None:
    """Show the skew, drift and co-activation of TRACE, layer by layer.

    TRACE is a file of any known format, or a folder of ESFT logs.
    """
    check_least("window", window)
    reading = take_read_options(options)
    data = open_trace(trace, reading)
    check_windows(data, window, reading)
    check_pairs(data, num_tables=4)
    found = describe(data, window_tokens=window, top=top)
    if as_json:
        print_json(found.to_dict())
        return
    console = Console()
    for line in (f"{trace}: {summary(data)}", *_facts(found)):
        print_line(console, line)
    console.print(_table(found))


@click.command()
@click.argument("kind", type=click.Choice([*KINDS, "mix"]))
@click.argument("target", type=PATH)
@click.option("--tokens", "num_tokens", type=int, help="Tokens.")
@click.option("--layers", "num_layers", type=int, help="MoE layers.")
@click.option("--experts", "num_experts", type=int, help="Logical experts per layer.")
@click.option("--top-k", type=int, help="Experts per token.")
@click.option("--imbalance", type=float, help="Max / mean load to reach in every layer.")
@click.option("--tolerance", type=float, help="Allowed relative distance from it.")
@click.option("--window", "window_tokens", type=int, help="Tokens per window.")
@click.option("--ranks", "num_ranks", type=int, help="Ranks (hot-rank, rotating).")
@click.option("--rho", type=float, help="Autocorrelation per window (drift).")
@click.option("--burst-share", type=float, help="Share of the windows (burst).")
@click.option("--base-imbalance", type=float, help="Imbalance between bursts.")
@click.option("--sequence-length", type=int, help="Tokens per sequence.")
@click.option("--rate", "requests_per_s", type=float, help="Arrivals per second.")
@click.option("--seed", type=int, help="Seed; equal seeds give equal traces.")
@click.option("--source", type=PATH, help="Recorded trace with labels (mix).")
@click.option("--clock", type=PATH, help="Request trace that gives the arrivals (mix).")
@click.option("--requests", type=int, help="Requests to draw (mix).")
@click.option("--cycle", "cycle_s", type=float, help="Seconds for all domains (mix).")
@click.option("--focus", type=float, help="Share on the domain whose turn it is (mix).")
@click.option("--json", "as_json", is_flag=True, help="Print the metadata as JSON.")
def synth(kind: str, target: Path, as_json: bool, **settings: Any) -> None:
    """Write a synthetic trace of KIND to TARGET (.npz or .json), its imbalance checked.

    zipf, drift and burst state the imbalance of experts, hot-rank and rotating that of ranks under
    the linear placement; mix draws real sequences of --source under the arrivals of --clock.
    """
    given = {name: value for name, value in settings.items() if value is not None}
    trace = _mix(given) if kind == "mix" else _synth(kind, given)
    write_trace(target, trace)
    facts = {key: value for key, value in trace.metadata.items() if key.startswith("synth_")}
    if as_json:
        print_json({"path": str(target), **facts})
        return
    click.echo(f"{target}: {summary(trace)}")
    for key, value in facts.items():
        click.echo(printable(f"  {key.removeprefix('synth_').replace('_', ' ')}: {value}"))


@click.command()
@click.argument("source", type=PATH)
@click.argument("target", type=PATH)
@click.option("--from", "source_format", type=click.Choice(list(FORMATS)), help="Not by content.")
@click.option(
    "--to",
    "target_format",
    type=click.Choice([name for name, item in FORMATS.items() if item.writes]),
    help="Not by suffix.",
)
@click.option("--window", type=int, default=2048, help="Tokens per window, where counts are kept.")
@click.option("--ranks", "num_ranks", type=int, help="Ranks of a placement that lacks them.")
@read_options
def convert(
    source: Path,
    target: Path,
    source_format: str | None,
    target_format: str | None,
    window: int,
    **options: Any,
) -> None:
    """Convert SOURCE, a trace or a placement, to the format of TARGET.

    The format of SOURCE is found by its content, that of TARGET by its suffix: .npz, .json, .pt
    (SGLang), .yaml (TensorRT-LLM), .npy (Omni). What TARGET can not say is listed.
    """
    check_least("window", window)
    done = convert_file(
        source,
        target,
        source_format=source_format,
        target_format=target_format,
        options=take_read_options(options),
        tokens_per_window=window,
    )
    click.echo(f"{target}: {done.what} ({done.source_format} -> {done.target_format})")
    for item in done.lost:
        click.echo(f"  not kept: {item}")


def _synth(kind: str, given: dict[str, Any]) -> RoutingTrace:
    _refuse(given, {"source", "clock", "requests", "cycle_s", "focus"}, "only mix has it")
    return synthesize(kind, SynthSpec(**given))


def _mix(given: dict[str, Any]) -> RoutingTrace:
    known = {"source", "clock", "requests", "cycle_s", "focus", "tolerance", "seed"}
    rate = given.pop("requests_per_s", None)
    _refuse(given, set(given) - known, "mix does not have it, its imbalance is that of --source")
    if "source" not in given:
        raise TraceError("source: mix needs --source, a recorded trace with labels")
    source = open_trace(given.pop("source"))
    if not isinstance(source, RoutingTrace):
        raise TraceError("source: must be a routing trace, not counts")
    clock, requests = given.pop("clock", None), given.pop("requests", None)
    spec = MixSpec(**given)
    if clock is not None and rate is not None:
        raise TraceError("rate: --clock already gives the arrivals")
    if clock is not None:
        times = read_clock(clock, limit=requests)
    else:
        times = poisson_clock(
            1000 if requests is None else requests, 1.0 if rate is None else rate, seed=spec.seed
        )
    return mix_under_clock(source, times, spec=spec)


def _refuse(given: dict[str, Any], names: set[str], why: str) -> None:
    wrong = sorted(names & set(given))
    if wrong:
        raise TraceError(f"{wrong[0]} = {given[wrong[0]]}: {why}")


def _facts(found: TraceInfo) -> list[str]:
    lines = []
    if found.labels:
        largest = sorted(found.labels.items(), key=lambda item: -item[1])
        shown = ", ".join(f"{name} {tokens:,}" for name, tokens in largest[:6])
        more = f" and {len(largest) - 6} more" if len(largest) > 6 else ""
        lines.append(f"tokens by label: {shown}{more}")
    if found.duration_s is not None:
        lines.append(f"arrivals over {found.duration_s:,.1f} s")
    lines += [f"{key}: {value[:200]}" for key, value in found.metadata.items()]
    return lines


def _table(found: TraceInfo) -> Table:
    window = f"{found.window_tokens:,} tokens" if found.window_tokens else "one step"
    table = Table(
        title=f"Expert load by layer ({found.num_windows:,} windows of {window})",
        caption="drift and co-activation: distance (by chance alone), 0 to 1",
    )
    for name in ("layer", "max/mean", "Gini", "CV", f"top {found.top}", "idle", "drift"):
        table.add_column(name, justify="right")
    table.add_column("co-activation", justify="right")
    for layer in found.layers:
        table.add_row(str(layer.layer), *_row(layer))
    if len(found.layers) > 1:
        table.add_section()
        table.add_row("mean", *_row(_mean_layer(found.layers)))
    return table


def _row(layer: LayerInfo) -> list[str]:
    return [
        f"{layer.imbalance:.3f}",
        f"{layer.gini:.3f}",
        f"{layer.cv:.3f}",
        f"{layer.top_share:.1%}",
        str(layer.idle_experts),
        _distance(layer.drift, layer.drift_noise),
        _distance(layer.coactivation, layer.coactivation_noise),
    ]


def _distance(value: float | None, noise: float | None) -> str:
    return "-" if value is None or noise is None else f"{value:.3f} ({noise:.3f})"


def _mean_layer(layers: tuple[LayerInfo, ...]) -> LayerInfo:
    def mean(name: str) -> Any:
        values = [getattr(layer, name) for layer in layers if getattr(layer, name) is not None]
        return float(np.mean(values)) if values else None

    return LayerInfo(
        layer=-1,
        imbalance=mean("imbalance"),
        gini=mean("gini"),
        cv=mean("cv"),
        top_share=mean("top_share"),
        idle_experts=round(mean("idle_experts")),
        drift=mean("drift"),
        drift_noise=mean("drift_noise"),
        coactivation=mean("coactivation"),
        coactivation_noise=mean("coactivation_noise"),
    )
