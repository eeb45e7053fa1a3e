"""Expert placement against its acceptance lines: balance, drift, node fan-out, planning time.

    python -m benchmarks.bench_placement [--only planning,drift,fanout,time] [--json-out FILE]

One JSON line per figure on stdout and one table on stderr; EPLB's figure is from the same run.
Needs no GPU and no torch; a core and a few minutes. Lines on real routing need the files of
``../shared/data/routing``.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from benchmarks import (
    placement_drift,
    placement_fanout,
    placement_planning,
    placement_time,
    report,
)
from benchmarks.placement_data import ROUTING
from benchmarks.placement_lines import publish

SECTIONS = {
    "time": placement_time.run,
    "planning": placement_planning.run,
    "drift": placement_drift.run,
    "fanout": placement_fanout.run,
}


def main() -> None:
    """Measures the sections asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", default=",".join(SECTIONS), help="comma-separated sections")
    parser.add_argument("--json-out", type=Path)
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.only.split(",")) - set(SECTIONS))
    if unknown:
        parser.error(f"--only: no section {unknown[0]!r}, there are {', '.join(SECTIONS)}")
    if not ROUTING.is_dir():
        print(f"no real routing at {ROUTING}: its lines are skipped", file=sys.stderr)
    lines = []
    for name in arguments.only.split(","):
        start = time.perf_counter()
        lines += SECTIONS[name]()
        print(f"{name}: {time.perf_counter() - start:.0f} s", file=sys.stderr)
    publish(lines, report.provenance("numpy"), arguments.json_out)


if __name__ == "__main__":
    main()
