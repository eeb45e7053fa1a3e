"""Seconds from the command to the first streamed token of the embedded model.

    python -m benchmarks.bench_startup [--ep 2] [--repetitions 3]

One JSON line: every repetition's seconds, their median, and the floor, which is how long a bare
``import torch`` takes on this machine in as many processes at once as there are ranks.
"""

from __future__ import annotations

import argparse
import http.client
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

from benchmarks import report
from benchmarks.server_process import stop

PORT_LINE = "Serving on http://"
BODY = {"prompt": "Once upon a time", "max_tokens": 1, "stream": True}


def first_token_seconds(ep: int) -> float:
    """Starts a server, waits for its address, and streams one token; stops the server."""
    command = [sys.executable, "-m", "moeserve", "serve", "--port", "0", "--ep", str(ep)]
    start = time.perf_counter()
    process = subprocess.Popen(command, stderr=subprocess.PIPE, start_new_session=True)
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if PORT_LINE in (text := line.decode()):
                host = text.split(PORT_LINE)[1].split()[0]
                break
        else:
            raise RuntimeError("the server ended before it served")
        connection = http.client.HTTPConnection(host, timeout=60)
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(BODY), headers)
        connection.getresponse().readline()
        return time.perf_counter() - start
    finally:
        stop(process)


def import_seconds(num_processes: int) -> float:
    """A bare ``import torch`` in so many processes at once."""
    start = time.perf_counter()
    processes = [
        subprocess.Popen([sys.executable, "-c", "import torch"]) for _ in range(num_processes)
    ]
    for process in processes:
        process.wait()
    return time.perf_counter() - start


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--ep", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--json-out", type=Path)
    args = parser.parse_args()
    floors = [import_seconds(args.ep) for _ in range(args.repetitions)]
    seconds = [first_token_seconds(args.ep) for _ in range(args.repetitions)]
    record = {
        "benchmark": "startup",
        **report.provenance("torch", "moeserve"),
        "ep": args.ep,
        "seconds": [round(s, 2) for s in seconds],
        "median_s": round(statistics.median(seconds), 2),
        "import_torch_s": round(statistics.median(floors), 2),
        "share_of_floor": round(statistics.median(floors) / statistics.median(seconds), 3),
    }
    report.print_json(record, args.json_out)


if __name__ == "__main__":
    main()
