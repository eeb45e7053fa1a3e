"""How much of a rank's step is not matrix products: one rank, stepped inside this process.

    python -m benchmarks.overhead MODEL_FOLDER [--concurrency 1,8,32]

The rank is put together by the engine's own assembly, so a step is a whole step: scheduling, batch
building, the model, sampling and the encoding of outputs. Only the socket is replaced, by a list.
One JSON line a cell.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch

from benchmarks import report
from benchmarks.shares import Shares, overhead_share
from moeserve import config, messages
from moeserve.engine.assembly import assemble
from moeserve.engine.channel import Channel, Mail
from moeserve.engine.spec import WorkerSpec
from moeserve.status import StatusPipe

SOURCE = b"benchmark"


class ListMailbox:
    """Stands in for a rank's ``Channel``; messages are put into it and outputs counted."""

    def __init__(self) -> None:
        self._mail: list[Mail] = []
        self.started: set[str] = set()
        self.finished: set[str] = set()

    def put(self, message: messages.ToRank) -> None:
        """Mail for the next step."""
        self._mail.append(Mail(SOURCE, message))

    def drain(self) -> list[Mail]:
        """As ``Channel.drain``."""
        mail, self._mail = self._mail, []
        return mail

    def wait(self, timeout_s: float | None = None) -> list[Mail]:
        """As ``Channel.wait``, but a benchmark that lets its rank go idle is wrong."""
        raise RuntimeError("the rank went idle in mid-benchmark")

    def wake_peers(self, step: int) -> None:
        """As ``Channel.wake_peers``: there are none."""

    def send(self, target: bytes, message: messages.FromRank) -> None:
        """As ``Channel.send``: encodes, as that does, and notes whose tokens came."""
        messages.encode(message)
        if isinstance(message, messages.StepOutputs):
            for output in message.outputs:
                if output.error is not None:
                    raise RuntimeError(f"the rank refused a request: {output.error}")
                self.started.add(output.request_id)
                if output.finish_reason is not None:
                    self.finished.add(output.request_id)


class SteppedRank:
    """One rank over ``model``, alone (ep = 1), that runs a step when told to.

    settings: any of moeserve's settings, by name.

    Raises:
        ValueError: a setting or the checkpoint is wrong.
    """

    def __init__(self, model: Path, *, dtype: str, threads: int, settings: dict[str, Any]) -> None:
        torch.set_num_threads(threads)
        serve_config = config.from_flat(
            **{
                "threads_per_rank": threads,
                **settings,
                "model": str(model),
                "dtype": dtype,
                "ep": 1,
            }
        )
        spec = WorkerSpec(
            config=serve_config, rank=0, endpoint="", peers=[], store="", num_threads=threads
        )
        self._mailbox = ListMailbox()
        channel = cast(Channel, self._mailbox)  # has what a loop calls
        rank, self._groups = assemble(spec, None, channel, StatusPipe(None))
        self._loop = rank.loop
        self._count = 0
        self._running: list[str] = []

    def decode(self, prompts: Sequence[list[int]], *, num_steps: int) -> Shares:
        """The shares of a decode step of ``prompts``, all prefilled before."""
        self._mailbox.put(messages.Abort(self._running))
        # Enough for the steps that are measured twice, and for those of prefills in several pieces.
        self._running = [self._add(prompt, 2 * num_steps + 1000) for prompt in prompts]
        while not self._mailbox.started.issuperset(self._running):
            self._loop.step()
        return overhead_share(self._loop.step, num_steps=num_steps)

    def prefill(self, prompts: Sequence[list[int]]) -> Shares:
        """The shares of the prefill of one prompt; ``prompts``: 3 or more, each used once."""
        self._mailbox.put(messages.Abort(self._running))
        self._running = []
        waiting = iter(prompts)

        def step() -> None:
            request_id = self._add(next(waiting), 1)
            while request_id not in self._mailbox.finished:
                self._loop.step()

        return overhead_share(step, num_steps=(len(prompts) - 1) // 2)

    def _add(self, prompt: list[int], max_tokens: int) -> str:
        self._count += 1
        params = messages.SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        self._mailbox.put(messages.NewRequest(str(self._count), prompt, params))
        return str(self._count)

    def close(self) -> None:
        """Leaves the group."""
        self._groups.close()


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One record per cell: concurrency, input_len, output_len and the shares."""
    settings = dict(argument.split("=", 1) for argument in args.engine_arg)
    rank = SteppedRank(
        args.model,
        dtype=args.dtype,
        threads=args.threads,
        settings={key: report.value_of(text) for key, text in settings.items()},
    )
    vocab_size = json.loads((args.model / "config.json").read_text())["vocab_size"]
    rng = random.Random(0)

    def prompts(count: int, length: int) -> list[list[int]]:
        return [[rng.randrange(vocab_size) for _ in range(length)] for _ in range(count)]

    records = []
    for concurrency in map(int, filter(None, args.concurrency.split(","))):
        shares = rank.decode(prompts(concurrency, args.input_len), num_steps=args.steps)
        records.append(_record(concurrency, args.input_len, args.output_len, shares))
    if args.prefill_len:
        shares = rank.prefill(prompts(5, args.prefill_len))
        records.append(_record(1, args.prefill_len, 1, shares))
    rank.close()
    return records


def _record(concurrency: int, input_len: int, output_len: int, shares: Shares) -> dict[str, Any]:
    cell = {"concurrency": concurrency, "input_len": input_len, "output_len": output_len}
    values = report.rounded({**dataclasses.asdict(shares), "overhead": shares.overhead})
    return {**cell, **values}


def main() -> None:
    """Command line; the names of the arguments are those of bench_offline."""
    parser = argparse.ArgumentParser(description="The share of a step that is no matrix product.")
    parser.add_argument("model", type=Path)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=report.usable_cores())
    parser.add_argument("--concurrency", default="1,8,32")
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=64, help="only named in the result")
    parser.add_argument("--prefill-len", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=20, help="decode steps, run twice")
    parser.add_argument("--engine-arg", action="append", default=[], metavar="KEY=VALUE")
    args = parser.parse_args()
    about = {"benchmark": "overhead", "model": args.model.name, "dtype": args.dtype,
             "threads": args.threads, **report.provenance("moeserve", "torch")}  # fmt: skip
    records = measure(args)
    for record in records:
        report.print_json(about | record)
    kinds = [field.name for field in dataclasses.fields(Shares)][1:]
    rows = [
        [f"c={r['concurrency']} {r['input_len']}->{r['output_len']}", r["step_s"] * 1e3]
        + [f"{r[kind]:.1%}" for kind in ["overhead", *kinds]]
        for r in records
    ]
    columns = ["cell", "step ms", "overhead", *(kind.replace("_", " ") for kind in kinds)]
    report.print_table(f"{args.model.name}: parts of a step", columns, rows)


if __name__ == "__main__":
    main()
