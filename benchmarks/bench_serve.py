"""Load on any OpenAI-compatible server: latency percentiles and tokens per second.

    python -m benchmarks.bench_serve --base-url http://127.0.0.1:8000 --concurrency 1,8,32
    python -m benchmarks.bench_serve --start "moeserve serve --port 8000" --base-url ...

Closed loop: ``concurrency`` workers send requests one after the other. Prompts are random token ids
(completions) or random words (chat), another seed for every request, so a prefix cache never hits;
lengths are fixed by max_tokens, min_tokens and ignore_eos; temperature is 0. One JSON line a cell.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import statistics
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import psutil

from benchmarks import report, server_process
from benchmarks.load import PATHS, Cell, Run, Target, run_cell
from benchmarks.sse_client import Address, ClientError, Connection


def result(cell: Cell, runs: list[Run]) -> dict[str, Any]:
    """The measured part of a JSON line: medians over ``runs``, percentiles over all requests."""
    timings = [timing for run in runs for timing in run.timings]
    errors = [error for run in runs for error in run.errors]
    rates = [run.output_tokens_per_s for run in runs]
    prompt_tokens = sum(timing.prompt_tokens or cell.input_len for timing in timings)
    output_tokens = sum(timing.output_tokens for timing in timings)
    wall_s = sum(run.wall_s for run in runs)
    prefill = round(prompt_tokens / wall_s, 1) if cell.output_len == 1 else None
    return {
        **dataclasses.asdict(cell),
        "repetitions": len(runs),
        "num_ok": len(timings),
        "num_errors": len(errors),
        "first_error": errors[0] if errors else None,
        "prompt_tokens_mean": prompt_tokens / len(timings) if timings else None,
        "output_tokens_mean": output_tokens / len(timings) if timings else None,
        "output_tokens_per_s": round(statistics.median(rates), 2),
        "output_tokens_per_s_all": [round(rate, 2) for rate in rates],
        "prefill_tokens_per_s": prefill,
        "requests_per_s": round(len(timings) / wall_s, 3),
        "ttft_ms": report.summary_ms([timing.ttft_s for timing in timings]),
        "itl_ms": report.summary_ms([gap for timing in timings for gap in timing.itl_s]),
        "e2e_ms": report.summary_ms([timing.e2e_s for timing in timings]),
        "tokens_per_chunk": (
            round(output_tokens / sum(timing.num_chunks for timing in timings), 3)
            if timings
            else None
        ),
        "client_cores": _median([run.client_cores for run in runs]),
        "server_cores": _median([run.server_cores for run in runs]),
        "other_cores": _median([run.other_cores for run in runs]),
    }


def _median(values: list[float] | list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(statistics.median(known), 3) if known else None


def cells_of(args: argparse.Namespace) -> list[Cell]:
    """The cells that the command line asks for; the prefill cell last."""
    cells = [
        Cell(
            concurrency=int(concurrency),
            num_prompts=args.num_prompts or args.waves * int(concurrency),
            input_len=args.input_len,
            output_len=args.output_len,
        )
        for concurrency in args.concurrency.split(",")
    ]
    if args.prefill_len:
        prefill = Cell(concurrency=1, num_prompts=2, input_len=args.prefill_len, output_len=1)
        cells.append(prefill)
    return cells


async def _get_json(target_address: Address, path: str, api_key: str | None) -> Any:
    """The JSON that GET ``path`` gives, or None when the server has no such path."""
    connection = Connection(target_address, api_key)
    try:
        reply = await connection.request("GET", path)
        return msgspec.json.decode(reply.body) if reply.status == 200 else None
    except (ClientError, msgspec.DecodeError):
        return None
    finally:
        connection.close()


async def _target(args: argparse.Namespace) -> Target:
    address = Address.parse(args.base_url)
    model = args.model
    if model is None:
        listed = await _get_json(address, "/v1/models", args.api_key)
        if not listed or not listed.get("data"):
            raise ClientError("the server lists no model: give --model")
        model = listed["data"][0]["id"]
    return Target(
        address=address,
        endpoint=args.endpoint,
        model=model,
        vocab_size=args.vocab_size,
        api_key=args.api_key,
        fixed_length=not args.no_fixed_length,
        extra=json.loads(args.extra_body),
        timeout_s=args.timeout,
    )


@contextlib.asynccontextmanager
async def _server(args: argparse.Namespace) -> AsyncIterator[tuple[psutil.Process | None, Any]]:
    """The server process and its start-up seconds; (process or None, None) when we start none."""
    if args.start is None:
        yield (psutil.Process(args.pid) if args.pid else None), None
        return
    async with server_process.running_server(
        args.start,
        Address.parse(args.base_url),
        ready_paths=(args.health_path, "/v1/models"),
        timeout_s=args.start_timeout,
        log=args.server_log,
    ) as (process, seconds):
        yield process, round(seconds, 2)


async def bench(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Runs all cells and returns their records, printing each when it is done."""
    records = []
    async with _server(args) as (process, startup_s):
        target = await _target(args)
        about = {
            "benchmark": "serve",
            "label": args.label,
            "model": target.model,
            "endpoint": target.endpoint,
            "command": args.start,
            "startup_s": startup_s,
            "server_version": await _get_json(target.address, "/version", args.api_key),
            **report.provenance("moeserve", "torch"),
        }
        for cell in cells_of(args):
            seed = f"{time.time_ns()}"
            warm = dataclasses.replace(cell, num_prompts=cell.concurrency)
            for index in range(args.warmup):
                await run_cell(target, warm, f"{seed}/warm{index}")
            runs = [
                await run_cell(target, cell, f"{seed}/{index}", process)
                for index in range(args.repetitions)
            ]
            records.append(about | result(cell, runs))
            report.print_json(records[-1], args.json_out)
    return records


def print_summary(records: list[dict[str, Any]]) -> None:
    """The table at the end of a run."""
    columns = ["cell", "out tok/s", "prefill tok/s", "TTFT p50/p90/p99 ms", "ITL p50/p90/p99 ms"]
    rows = [
        [
            f"c={r['concurrency']} {r['input_len']}->{r['output_len']}",
            r["output_tokens_per_s"],
            r["prefill_tokens_per_s"],
            _percentiles(r["ttft_ms"]),
            _percentiles(r["itl_ms"]),
            _percentiles(r["e2e_ms"]),
            r["num_errors"],
        ]
        for r in records
    ]
    title = f"{records[0]['label'] or records[0]['model']} ({records[0]['endpoint']})"
    report.print_table(title, [*columns, "e2e p50/p90/p99 ms", "errors"], rows)


def _percentiles(summary: dict[str, float] | None) -> str:
    return "-" if summary is None else "/".join(f"{summary[p]:.1f}" for p in ("p50", "p90", "p99"))


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(description="Load test of an OpenAI-compatible server.")
    add = result.add_argument
    add("--base-url", default="http://127.0.0.1:8000")
    add("--model", help="default: the first that the server lists")
    add("--endpoint", choices=sorted(PATHS), default="completions")
    add("--concurrency", default="1,8,32", help="comma-separated; one cell each")
    add("--num-prompts", type=int, help="requests per cell; default: waves x concurrency")
    add("--waves", type=int, default=2, help="requests per worker")
    add("--input-len", type=int, default=128, help="prompt tokens (chat: words)")
    add("--output-len", type=int, default=64)
    add("--prefill-len", type=int, default=1024, help="prompt of the prefill cell; 0: no such cell")
    add("--repetitions", type=int, default=3)
    add("--warmup", type=int, default=1, help="waves before each cell that do not count")
    add("--vocab-size", type=int, default=4000, help="prompt ids are below this")
    add("--no-fixed-length", action="store_true", help="omit min_tokens and ignore_eos")
    add("--extra-body", default="{}", help="JSON merged into each request")
    add("--api-key", default=os.environ.get("OPENAI_API_KEY"))
    add("--timeout", type=float, default=600.0, help="seconds a request may take")
    add("--start", help="command that starts the server; it is stopped at the end")
    add("--start-timeout", type=float, default=300.0)
    add("--health-path", default="/health")
    add("--server-log", type=Path, default=Path("bench_server.log"))
    add("--pid", type=int, help="the server's pid, to report its CPU use (without --start)")
    add("--label", default="")
    add("--json-out", type=Path, help="append the JSON lines to this file too")
    return result


def main() -> int:
    """Command line; exit code 1 when a request failed."""
    records = asyncio.run(bench(parser().parse_args()))
    print_summary(records)
    return 1 if any(record["num_errors"] for record in records) else 0


if __name__ == "__main__":
    sys.exit(main())
