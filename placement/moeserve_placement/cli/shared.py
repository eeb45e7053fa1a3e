"""What several commands have: paths, the options of reading, a progress bar, output."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from moeserve_placement.report.words import printable
from moeserve_placement.traces.files import MAX_BYTES
from moeserve_placement.traces.options import ReadOptions
from moeserve_placement.traces.trace import CountTrace, RoutingTrace, check_counts_size

_MAX_PAIR_BYTES = 4 << 30


class _FilePath(click.Path):
    """A path that is not empty: that would be the present folder."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not str(value):
            name = param.name if param is not None else "path"
            raise ValueError(f"{name} = '': must be the name of a file")
        return super().convert(value, param, ctx)


PATH = _FilePath(path_type=Path)
_READ_OPTIONS = [
    click.option("--num-experts", type=int, help="Logical experts, where the file lacks them."),
    click.option("--top-k", type=int, help="Experts per token (ESFT logs)."),
    click.option("--select", help="Only the arrays of a raw npz whose name starts so."),
    click.option("--first-layer", type=int, default=0, help="Model layer index of the first."),
    click.option("--max-bytes", type=int, default=MAX_BYTES, help="Limit on one array in memory."),
]


def read_options(command: Any) -> Any:
    """Adds the options that ``take_read_options`` takes."""
    for option in reversed(_READ_OPTIONS):
        command = option(command)
    return command


def take_read_options(given: dict[str, Any]) -> ReadOptions:
    """The options of reading, taken out of ``given``.

    Raises:
        TraceError: a number is out of range.
    """
    names = [item.name for item in fields(ReadOptions) if item.name in given]
    return ReadOptions(**{name: given.pop(name) for name in names})


def check_least(name: str, value: int, least: int = 1) -> None:
    """Raises ValueError where an option is below ``least``."""
    if value < least:
        raise ValueError(f"{name} = {value}: must be at least {least}")


def check_windows(data: RoutingTrace | CountTrace, tokens: int, options: ReadOptions) -> None:
    """Raises TraceError where the counts of windows of ``tokens`` tokens take too much memory."""
    if isinstance(data, RoutingTrace):
        check_counts_size(data, tokens, max_bytes=options.max_bytes)


def check_pairs(data: RoutingTrace | CountTrace, *, num_tables: int) -> None:
    """Raises ValueError where ``num_tables`` tables of expert pairs take too much memory."""
    if isinstance(data, CountTrace) or data.top_k == 1:
        return
    num_bytes = 8 * num_tables * data.num_experts**2
    if num_bytes > _MAX_PAIR_BYTES:
        raise ValueError(
            f"num_experts = {data.num_experts}: co-activation needs {num_tables} tables of experts "
            f"x experts, {num_bytes:,} bytes, must be at most {_MAX_PAIR_BYTES:,}"
        )


@contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """Gives what to call with (what runs now, steps done, steps in all).

    The bar is on the error stream, so that results can be piped; none where that is no terminal.
    """
    console = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    with bar:
        task = bar.add_task("starting", total=None)
        yield lambda text, done, total: bar.update(
            task, description=text, completed=done, total=total
        )


def plain(text: str) -> Text:
    """Text as it is: names from files are neither markup nor commands to the terminal."""
    return Text(printable(text))


def print_line(console: Console, text: str) -> None:
    """Prints text as it is, without line breaks of our own."""
    console.print(plain(text), soft_wrap=True)


def print_json(value: Any, *, indent: int | None = 2) -> None:
    """Prints JSON that every parser takes: a NaN is an error."""
    click.echo(json.dumps(value, indent=indent, allow_nan=False))
