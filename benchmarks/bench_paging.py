"""The paging study on recorded traces, against its limits.

    python -m benchmarks.bench_paging [--traces FOLDER] [--seeds 3,4,5] [--quick]

One JSON line per row on stdout, then tables and the limits on stderr; exit code 1 if one is not met
by the median of the splits. The traces are not part of this repository: see the sources in the
README.

What was looked at before: settings of ``reuse`` were chosen on the training half of seed 0, split
again, but scored sequences of seeds 0 and 1 were looked at as well while it was made. Settings of
``neighbours`` and of prefetch were chosen on the training half of seed 0 alone, split again. All
splits draw from the same sequences, so no seed is wholly unseen; the default seeds are those whose
scores were never looked at before the settings were final. ``--seeds 0`` scores only sequences
that no choice for prefetch was made on.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks import report
from moeserve_placement.paging import StallModel, StudyOptions, StudyRow, run_study
from moeserve_placement.traces import RoutingTrace, open_trace

TRACES = Path(__file__).resolve().parents[2] / "shared/data/routing"
GPT_OSS = "gptoss20b_top4_decode.npz"
DEEPSEEK = "esft_dsv2lite_top6.npz"

LEAST_GAP_CLOSED = 0.45
"""Of the LRU to Belady gap, by eviction alone: gpt-oss-20b, 16 of 32 experts, batch 1."""
MOST_STALL_RATIO = 0.5
"""Of LRU's stalls per token, and of its time stalled, with prefetch on top, same setting, default
stall model."""


def main() -> int:
    """Run, print, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--traces", type=Path, default=TRACES)
    parser.add_argument("--seeds", default="3,4,5", help="Splits of the batch-1 acceptance.")
    parser.add_argument("--quick", action="store_true", help="Only the acceptance rows, one seed.")
    arguments = parser.parse_args()
    path = arguments.traces / GPT_OSS
    if not path.exists():
        print(f"skipped: {path} is not there", file=sys.stderr)
        return 0
    trace = open_trace(path)
    assert isinstance(trace, RoutingTrace)
    seeds = [int(seed) for seed in arguments.seeds.split(",")]
    rows = []
    for seed in seeds[:1] if arguments.quick else seeds:
        rows += measure("gpt-oss-20b", trace, acceptance_options(seed))
    if not arguments.quick:
        show_the_rest(trace, arguments.traces / DEEPSEEK)
    return verdict(rows)


def acceptance_options(seed: int) -> StudyOptions:
    """Batch 1, 16 experts, the default stall model."""
    return StudyOptions(
        capacities=(16,),
        batches=(1,),
        policies=("lru", "reuse", "belady"),
        predictors=("none", "neighbours"),
        seed=seed,
        shared_pool=False,
    )


def show_the_rest(trace: RoutingTrace, deepseek: Path) -> None:
    """All policies, batches and capacities; other links; more to learn from; another model."""
    measure("gpt-oss-20b", trace, StudyOptions(capacities=(8, 16, 24), seed=3))
    few = {
        "policies": ("lru", "reuse"),
        "predictors": ("none", "neighbours"),
        "shared_pool": False,
        "seed": 3,
    }
    for bandwidth, parts, compute in ((25.0, 3, 200.0), (50.0, 1, 200.0), (50.0, 3, 400.0)):
        stall = StallModel(
            bandwidth_gb_per_s=bandwidth, parts_per_expert=parts, compute_us_per_layer=compute
        )
        options = StudyOptions(capacities=(16,), batches=(1,), stall=stall, **few)
        name = f"gpt-oss-20b, {bandwidth:.0f} GB/s, {parts} parts, {compute:.0f} us a layer"
        measure(name, trace, options)
    options = StudyOptions(capacities=(16,), batches=(1,), train_share=0.8, **few)
    measure("gpt-oss-20b, learned on 80 %", trace, options)
    if deepseek.exists():
        other = open_trace(deepseek)
        assert isinstance(other, RoutingTrace)
        measure("ESFT, DeepSeek-V2-Lite", other, StudyOptions(capacities=(24,), **few))


def measure(name: str, trace: RoutingTrace, options: StudyOptions) -> list[StudyRow]:
    """Run a study and print its rows."""
    start = time.perf_counter()
    rows = run_study(trace, options)
    seconds = time.perf_counter() - start
    print(f"\n{name}, seed {options.seed}: {seconds:.0f} s", file=sys.stderr)
    print(HEADER, file=sys.stderr)
    for row in rows:
        line = {"trace": name, "seed": options.seed, "seconds": round(seconds, 1), **row.to_dict()}
        report.print_json({**stamp(), **line})
        print(text(row), file=sys.stderr, flush=True)
    return rows


@cache
def stamp() -> dict[str, Any]:
    """What every line begins with."""
    return {"benchmark": "paging", **report.provenance("numpy")}


HEADER = (
    "batch cache policy                  hit rate   gap  prec cover  stalls  ratio"
    "  stall us  ratio  own us"
)


def text(row: StudyRow) -> str:
    """One line of the table."""
    result = row.result
    name = f"{'pool ' if row.shared_pool else ''}{result.name}"
    return (
        f"{result.batch:5d} {result.capacity:5d} {name:24s}{result.hit_rate:8.3f} "
        f"{share(row.gap_closed)} {share(result.precision)} {share(result.coverage)} "
        f"{result.stalls_per_token:7.2f} {ratio(row.stall_ratio)} "
        f"{result.stall_us_per_token:9.0f} {ratio(row.stall_us_ratio)} "
        f"{result.policy_us_per_token:7.0f}"
    )


def share(value: float | None) -> str:
    """A percentage of five characters."""
    return "    -" if value is None else f"{value:5.0%}"


def ratio(value: float | None) -> str:
    """A ratio of six characters."""
    return "     -" if value is None else f"{value:6.2f}"


def verdict(rows: list[StudyRow]) -> int:
    """Print the limits; 1 if the median of the splits does not meet one."""
    eviction = [row.gap_closed or 0.0 for row in rows if row.result.name == "reuse"]
    prefetch = [row for row in rows if row.result.name == "reuse + neighbours"]
    stalls = [row.stall_ratio or 0.0 for row in prefetch]
    times = [row.stall_us_ratio or 0.0 for row in prefetch]
    checks = (
        ("gap closed by eviction", eviction, ">=", LEAST_GAP_CLOSED, min(eviction)),
        ("stalls with prefetch / LRU's", stalls, "<=", MOST_STALL_RATIO, max(stalls)),
        ("stall us with prefetch / LRU's", times, "<=", MOST_STALL_RATIO, max(times)),
    )
    print(f"\nlimits, median of {len(eviction)} splits", file=sys.stderr)
    all_passed = True
    for name, values, sign, limit, worst in checks:
        value = statistics.median(values)
        passed = value >= limit if sign == ">=" else value <= limit
        all_passed &= passed
        state = "pass" if passed else "FAIL"
        print(f"{state}  {name}: {value:.3f} {sign} {limit}, worst {worst:.3f}", file=sys.stderr)
        line = {"limit": name, "median": value, "worst": worst, "bound": limit, "passed": passed}
        report.print_json({**stamp(), **line})
    return 0 if all_passed else 1


if __name__ == "__main__":
    sys.exit(main())
