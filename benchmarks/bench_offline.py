"""moeserve beside transformers and the machine's floor, on one model, in one run.

    python -m benchmarks.bench_offline MODEL_FOLDER --json-out benchmarks/results/NAME.json

Each engine lives in a process of its own and is idle while another one works. Repetitions are
interleaved (moeserve, generate, continuous, moeserve, ...) and the machine's limits are measured
anew in each of them, so that a slow minute hits all alike. One JSON line a cell.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import limits, report
from benchmarks.engine_process import EngineProcess
from benchmarks.engines import ENGINES, EngineSpec, Outcome, Task
from benchmarks.shares import Shares

OVERHEAD_FIELDS = ("overhead", *(field.name for field in dataclasses.fields(Shares)))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One load: prompts that start together, and their lengths."""

    concurrency: int
    input_len: int
    output_len: int

    @property
    def is_prefill(self) -> bool:
        """One output token: the cell measures prompt tokens per second."""
        return self.output_len == 1

    @property
    def num_tokens(self) -> int:
        """Tokens that the rate counts."""
        return self.concurrency * (self.input_len if self.is_prefill else self.output_len)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One engine's run of a cell; other_cores: what the rest of the machine used meanwhile."""

    outcome: Outcome
    other_cores: float


def prompts_of(cell: Cell, vocab_size: int, seed: str) -> list[list[int]]:
    """Random prompts, the same for every engine; low ids are special tokens and single bytes."""
    rng = random.Random(seed)
    low = min(300, vocab_size // 2)
    return [
        [rng.randrange(low, vocab_size) for _ in range(cell.input_len)]
        for _ in range(cell.concurrency)
    ]


async def run_cell(
    engines: Sequence[EngineProcess], cell: Cell, *, vocab_size: int, repetitions: int, threads: int
) -> tuple[dict[str, list[Sample]], list[dict[str, float]]]:
    """All samples by engine, and the machine's limits measured in each repetition."""
    seed = str(time.time_ns())
    warm = Task(
        prompts=prompts_of(cell, vocab_size, f"{seed}/warm"), output_len=min(4, cell.output_len)
    )
    for engine in engines:
        await engine.run(warm)
    samples: dict[str, list[Sample]] = {engine.spec.name: [] for engine in engines}
    measured = []
    for repetition in range(repetitions):
        measured.append(limits.measure(threads=threads))
        prompts = prompts_of(cell, vocab_size, f"{seed}/{repetition}")
        task = Task(prompts=prompts, output_len=cell.output_len)
        for engine in engines:
            samples[engine.spec.name].append(await _sample(engine, task))
    return samples, measured


async def _sample(engine: EngineProcess, task: Task) -> Sample:
    start, busy, own = time.perf_counter(), report.busy_core_seconds(), engine.cpu_seconds()
    outcome = await engine.run(task)
    busy, own = report.busy_core_seconds() - busy, engine.cpu_seconds() - own
    elapsed_s = time.perf_counter() - start  # with set-up that the engine does not count
    return Sample(outcome=outcome, other_cores=max(0.0, busy - own) / elapsed_s)


def summarise(cell: Cell, samples: Sequence[Sample], floor_rate: float) -> dict[str, Any]:
    """One engine's figures for a cell: median tokens/s, all of them, and the share of the floor."""
    rates = [cell.num_tokens / sample.outcome.wall_s for sample in samples]
    median = statistics.median(rates)
    return {
        "tokens_per_s": round(median, 2),
        "tokens_per_s_all": [round(rate, 2) for rate in rates],
        "share_of_floor": round(median / floor_rate, 4),
        "other_cores": round(max(sample.other_cores for sample in samples), 3),
    }


def floor_of(
    cell: Cell, shape: limits.ModelShape, measured: Sequence[dict[str, float]]
) -> dict[str, float]:
    """The floor of ``cell`` at the median of the measured limits, with those limits."""
    median = {key: statistics.median([one[key] for one in measured]) for key in measured[0]}
    floor = limits.closed_loop_floor(
        shape,
        limits.machine_of(median),
        concurrency=cell.concurrency,
        input_len=cell.input_len,
        output_len=cell.output_len,
    )
    key = "prefill_tokens_per_s" if cell.is_prefill else "output_tokens_per_s"
    return report.rounded({"tokens_per_s": floor[key], **floor, **median})


def record(
    cell: Cell,
    samples: dict[str, list[Sample]],
    floor: dict[str, float],
) -> dict[str, Any]:
    """The measured part of a JSON line. The first engine is the one that the ratios are about."""
    own, *peers = samples
    figures = {
        name: summarise(cell, taken, floor["tokens_per_s"]) for name, taken in samples.items()
    }
    own_first = [token for sample in samples[own] for token in sample.outcome.first_tokens]
    for peer in peers:
        first = [token for sample in samples[peer] for token in sample.outcome.first_tokens]
        same = sum(a == b for a, b in zip(own_first, first, strict=True))
        figures[peer]["same_first_token"] = round(same / len(first), 3)
    return {
        **dataclasses.asdict(cell),
        "unit": "prompt tokens/s" if cell.is_prefill else "output tokens/s",
        "result": figures[own]["tokens_per_s"],
        "floor": floor["tokens_per_s"],
        "share_of_floor": figures[own]["share_of_floor"],
        "ratio": {
            peer: round(figures[own]["tokens_per_s"] / figures[peer]["tokens_per_s"], 3)
            for peer in peers
        },
        "engines": figures,
        "limits": floor,
    }


def specs_of(args: argparse.Namespace) -> list[EngineSpec]:
    """moeserve, then the peers; a peer is ``kind`` or ``kind:dtype``.

    Raises:
        ValueError: no such engine.
    """
    given = dict(argument.split("=", 1) for argument in args.engine_arg)
    specs = []
    for text in ["moeserve", *filter(None, args.peers.split(","))]:
        kind, _, dtype = text.partition(":")
        if kind not in ENGINES:
            raise ValueError(f"peers = {kind!r}: must be of {', '.join(ENGINES)}")
        specs.append(
            EngineSpec(
                kind=kind,
                model=str(args.model.resolve()),
                dtype=dtype or args.dtype,
                threads=args.threads,
                ep=args.ep if kind == "moeserve" else 1,
                experts_implementation=args.experts_implementation,
                args={key: report.value_of(text) for key, text in given.items()},
            )
        )
    return specs


@contextlib.asynccontextmanager
async def _started(
    specs: Sequence[EngineSpec], timeout_s: float
) -> AsyncIterator[list[EngineProcess]]:
    """The engines, loaded one after the other; all are stopped at the end."""
    async with contextlib.AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(EngineProcess.start(spec, timeout_s)) for spec in specs
        ]


async def overheads(
    own: EngineSpec, cells: Sequence[Cell], options: argparse.Namespace
) -> dict[Cell, dict[str, float]]:
    """What share of moeserve's step is not matrix products, by cell (overhead.py, at ep = 1).

    Runs before any engine is loaded, in a process of its own.

    Raises:
        RuntimeError: that process failed.
    """
    if own.kind != "moeserve":
        return {}
    arguments = [
        *(own.model, "--dtype", own.dtype, "--threads", str(own.threads)),
        *("--concurrency", options.concurrency, "--input-len", str(options.input_len)),
        *("--output-len", str(options.output_len), "--prefill-len", str(options.prefill_len)),
        *(text for argument in options.engine_arg for text in ("--engine-arg", argument)),
    ]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.overhead", *arguments),
        stdout=asyncio.subprocess.PIPE,
        cwd=Path(__file__).parent.parent,
    )
    output, _ = await process.communicate()
    if process.returncode:
        raise RuntimeError(f"overhead.py ended with {process.returncode}, see above")
    found = {}
    for line in map(json.loads, output.splitlines()):
        cell = Cell(**{field.name: line[field.name] for field in dataclasses.fields(Cell)})
        found[cell] = {name: line[name] for name in OVERHEAD_FIELDS}
    return {cell: found[cell] for cell in cells}


async def bench(
    specs: Sequence[EngineSpec], cells: Sequence[Cell], *, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Runs all cells, prints each record when it is done and returns them."""
    first = specs[0]
    folder = Path(first.model)
    shape = limits.read_shape(folder, first.dtype)
    about = {
        "benchmark": "offline",
        "model": folder.name,
        "dtype": first.dtype,
        "ep": first.ep,
        "threads": first.threads,
        "engine_args": first.args,
        "repetitions": options.repetitions,
        **report.provenance("moeserve", "torch", "transformers"),
    }
    records = []
    overhead = await overheads(first, cells, options)
    async with _started(specs, options.timeout) as engines:
        load_s = {engine.spec.name: round(engine.load_s, 2) for engine in engines}
        for cell in cells:
            samples, measured = await run_cell(
                engines,
                cell,
                vocab_size=shape.vocab_size,
                repetitions=options.repetitions,
                threads=first.threads,
            )
            line = about | record(cell, samples, floor_of(cell, shape, measured))
            line["overhead"] = overhead.get(cell)
            line["load_s"] = load_s
            line["peak_memory_mb"] = {e.spec.name: e.peak_memory_mb() for e in engines}
            records.append(line)
            report.print_json(line, options.json_out)
    return records


def print_summary(records: Sequence[dict[str, Any]]) -> None:
    """The table at the end of a run: tokens/s of every engine, share of the floor, ratios."""
    own, *peers = records[0]["engines"]
    columns = ["cell", "floor", own, "of floor", "overhead"]
    for peer in peers:
        columns += [peer, f"{own.partition(':')[0]} is"]
    rows = []
    for line in records:
        kind = "prefill" if line["output_len"] == 1 else "decode"
        row: list[object] = [
            f"{kind} c={line['concurrency']} {line['input_len']}->{line['output_len']}",
            line["floor"],
            line["result"],
            f"{line['share_of_floor']:.1%}",
            None if line["overhead"] is None else f"{line['overhead']['overhead']:.1%}",
        ]
        for peer in peers:
            row += [line["engines"][peer]["tokens_per_s"], f"{line['ratio'][peer]:.2f}x"]
        rows.append(row)
    title = f"{records[0]['model']} {records[0]['dtype']} ep={records[0]['ep']}: tokens/s"
    report.print_table(title, columns, rows)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(description="moeserve beside transformers and the floor.")
    add = result.add_argument
    add("model", type=Path, help="folder of the model (see benchmarks/models.py)")
    add("--ep", type=int, default=1, help="expert-parallel ranks of moeserve")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    add(
        "--peers",
        default="generate,continuous",
        help="comma-separated; kind or kind:dtype, such as generate:float32",
    )
    add("--experts-implementation", default="grouped_mm", help="of transformers")
    add(
        "--engine-arg", action="append", default=[], metavar="NAME=VALUE", help="for moeserve's LLM"
    )
    add("--threads", type=int, default=report.usable_cores(), help="of each engine in all")
    add("--concurrency", default="1,8,32", help="comma-separated; one cell each; empty: none")
    add("--input-len", type=int, default=128)
    add("--output-len", type=int, default=64)
    add("--prefill-len", type=int, default=1024, help="prompt of the prefill cell; 0: no such cell")
    add("--repetitions", type=int, default=3)
    add("--timeout", type=float, default=900.0, help="seconds that loading or a task may take")
    add("--json-out", type=Path, help="append the JSON lines to this file too")
    return result


def cells_of(args: argparse.Namespace) -> list[Cell]:
    """The cells that the command line asks for; the prefill cell last."""
    cells = [
        Cell(concurrency=int(text), input_len=args.input_len, output_len=args.output_len)
        for text in filter(None, args.concurrency.split(","))
    ]
    if args.prefill_len:
        cells.append(Cell(concurrency=1, input_len=args.prefill_len, output_len=1))
    return cells


def main() -> None:
    """Command line."""
    args = parser().parse_args()
    records = asyncio.run(bench(specs_of(args), cells_of(args), options=args))
    print_summary(records)


if __name__ == "__main__":
    main()
