"""What load skew costs in real serving over HTTP, and what moving experts wins back.

    python -m benchmarks.bench_skew --quick
    python -m benchmarks.bench_skew build/mid-qwen3moe --ep 2 --report skew.html
    moeserve bench skew --workloads balanced,hot-rank --planners off,scenario

For every workload and planner a server is started and measured at every concurrency; repetitions
are interleaved, so that a slow minute of the machine hits all alike. Routing is forced on the
server (--force-routing), except for ``natural``, where the embedded model's own gate decides on
prompts of one domain, then of another. If the measured load is not the asked one the run fails.
One JSON line a cell on stdout, a table on stderr, a page with pictures in --report.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import report, skew_workloads
from benchmarks.server_process import ServerFailedError
from benchmarks.skew_cells import Plan, Served, record, serve_and_measure
from benchmarks.skew_measure import SkewError
from benchmarks.skew_report import check_report, save_report

WORKLOADS = (
    "balanced", "zipf", "hot-expert", "hot-rank", "spread-hot", "ragged-sources", "empty-rank",
    "rotating", "burst", "natural",
)  # fmt: skip
PLANNERS = ("off", "eplb", "scenario", "eplb-sticky", "flashlb", "exchange")
_QUICK: dict[str, Any] = {
    "workloads": "balanced,zipf,hot-rank,natural",
    "planners": "off,scenario",
    "concurrency": "8,32",
    "repetitions": 1,
    "output_len": 48,
    "settle": 6.0,
    "window_tokens": 512,
    "interval": 1.0,
}
_FULL: dict[str, Any] = {
    "workloads": ",".join(WORKLOADS),
    "planners": "off,eplb,scenario",
    "concurrency": "4,32",
    "repetitions": 3,
    "output_len": 64,
    "settle": 30.0,
    "window_tokens": 2048,
    "interval": 2.0,
}

Key = tuple[str, str]  # workload, planner


async def bench(plan: Plan) -> tuple[list[dict[str, Any]], dict[Key, Served]]:
    """Runs everything; the records, and the first repetition of each workload and planner.

    Raises:
        SkewError, ServerFailedError: see ``skew_cells.serve_and_measure``.
    """
    about = {"benchmark": "skew", "model": plan.model, **report.provenance("moeserve", "torch")}
    served: dict[Key, list[Served]] = {}
    for repetition in range(plan.repetitions):
        for workload in plan.workloads:
            for planner in plan.planners:
                seed = f"{time.time_ns()}"
                print(f"{repetition}: {workload.name}, {planner}", file=sys.stderr, flush=True)
                life = await serve_and_measure(plan, workload, planner, seed)
                served.setdefault((workload.name, planner), []).append(life)
    records = []
    for workload in plan.workloads:
        for planner in plan.planners:
            lives = served[workload.name, planner]
            for concurrency in plan.concurrency:
                loads = [life.loads[concurrency] for life in lives]
                records.append(about | record(plan, workload, planner, concurrency, loads))
    add_share_of_balanced(records)
    return records, {key: lives[0] for key, lives in served.items()}


def add_share_of_balanced(records: list[dict[str, Any]]) -> None:
    """Adds each rate over that of the balanced workload without a planner, where that was run."""
    balanced = {
        r["concurrency"]: r["output_tokens_per_s"]
        for r in records
        if (r["workload"], r["planner"]) == ("balanced", "off")
    }
    for r in records:
        base = balanced.get(r["concurrency"])
        r["share_of_balanced"] = round(r["output_tokens_per_s"] / base, 4) if base else None


def print_summary(records: list[dict[str, Any]]) -> None:
    """The table at the end of a run."""
    columns = [
        "workload", "planner", "c", "out tok/s", "floor", "of floor", "of balanced",
        "balance asked", "computed", "step ms", "lost ms", "TTFT p50/p99", "ITL p50/p99",
        "plans", "moved MB", "other cores",
    ]  # fmt: skip
    rows = [
        [
            r["workload"],
            r["planner"],
            r["concurrency"],
            r["output_tokens_per_s"],
            r["floor_tokens_per_s"],
            r["share_of_floor"],
            r["share_of_balanced"],
            r["balancedness_asked"],
            r["balancedness_computed"],
            r["step_ms"],
            r["lost_ms_per_step"],
            _percentiles(r["ttft_ms"]),
            _percentiles(r["itl_ms"]),
            r["moves"]["plans"],
            r["moves"]["bytes"] / 1e6,
            r["other_cores"],
        ]
        for r in records
    ]
    title = "Load skew; floor: what perfect balance would give, the same run without waiting"
    report.print_table(title, columns, rows)


def _percentiles(summary: dict[str, float] | None) -> str:
    return "-" if summary is None else "/".join(f"{summary[p]:.1f}" for p in ("p50", "p99"))


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(
        prog="bench skew", description="What load skew costs in serving, and what moves win back."
    )
    add = result.add_argument
    add("model", nargs="?", default="embedded", help="folder of a checkpoint, or embedded")
    add("--quick", action="store_true", help="other defaults, for about two minutes on 2 cores")
    add("--workloads", help=f"comma-separated, of {', '.join(WORKLOADS)}")
    add("--planners", help=f"comma-separated, of {', '.join(PLANNERS)}")
    add("--concurrency", help="comma-separated; default: a small and a large one")
    add("--repetitions", type=int, help="interleaved")
    add("--ep", type=int, default=2, help="ranks, one thread each")
    add("--spare", type=int, help="spare slots a layer; default: a quarter of the experts")
    add("--input-len", type=int, default=32, help="prompt tokens")
    add("--output-len", type=int)
    add("--waves", type=int, default=2, help="requests per worker in a measurement")
    add("--span-steps", type=int, default=64, help="steps of a span of rotating and burst")
    add("--zipf", type=float, default=1.2, help="exponent of zipf")
    add("--settle", type=float, help="most seconds of load before measuring, with a planner")
    add("--window-tokens", type=int, help="the server's")
    add("--interval", type=float, help="the server's --rebalance-interval")
    add("--poll", type=float, default=0.2, help="seconds between snapshots of the load")
    add("--tolerance", type=float, default=0.05, help="allowed distance from the asked load")
    add("--server-arg", action="append", default=[], help="one more argument of the server")
    add("--server-log", type=Path, default=Path("bench_server.log"))
    add("--json-out", type=Path, help="append the JSON lines to this file too")
    add("--report", type=Path, help="page with pictures to write, .html or .png")
    return result


def plan_of(args: argparse.Namespace) -> Plan:
    """The settings that the command line asks for.

    Raises:
        ValueError: an unknown workload or planner, or a number that can not be.
    """
    defaults = _QUICK if args.quick else _FULL
    chosen = {key: getattr(args, key) or default for key, default in defaults.items()}
    known = skew_workloads.workloads(steps=args.span_steps, exponent=args.zipf)
    wanted = _names("workloads", chosen["workloads"], WORKLOADS)
    if args.model != "embedded" and "natural" in wanted:
        print("natural needs the embedded model: left out", file=sys.stderr)
        wanted = tuple(name for name in wanted if name != "natural")
    plan = Plan(
        model=args.model,
        ep=args.ep,
        spare=args.spare or 0,
        planners=_names("planners", chosen["planners"], PLANNERS),
        workloads=tuple(known[name] for name in wanted),
        concurrency=tuple(int(text) for text in str(chosen["concurrency"]).split(",")),
        input_len=args.input_len,
        output_len=chosen["output_len"],
        waves=args.waves,
        repetitions=chosen["repetitions"],
        settle_s=chosen["settle"],
        poll_s=args.poll,
        window_tokens=chosen["window_tokens"],
        interval_s=chosen["interval"],
        tolerance=args.tolerance,
        server_log=args.server_log,
        extra=tuple(args.server_arg),
    )
    if args.spare is None:
        plan = dataclasses.replace(plan, spare=plan.spec.num_experts // 4)
    _check(plan)
    return plan


def _check(plan: Plan) -> None:
    """Raises ValueError where a workload can not be on this model and number of ranks."""
    for workload in plan.workloads:
        plan.routing(workload)
        if workload.streams is skew_workloads.ragged:
            skew_workloads.check_ragged(min(plan.concurrency), plan.ep)


def _names(option: str, text: str, known: Sequence[str]) -> tuple[str, ...]:
    names = tuple(text.split(","))
    for name in names:
        if name not in known:
            raise ValueError(f"{option} = {name!r}: must be among {', '.join(known)}")
    return names


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; exit code 1 when the load was not the asked one or a server failed."""
    args = parser().parse_args(arguments)
    try:
        check_report(args.report)
        plan = plan_of(args)
        records, lives = asyncio.run(bench(plan))
    except (SkewError, ServerFailedError, ValueError) as error:
        print(f"bench skew: {error}", file=sys.stderr)
        return 1
    for line in records:
        report.print_json(line, args.json_out)
    print_summary(records)
    if args.report is not None:
        save_report(records, lives, args.report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
