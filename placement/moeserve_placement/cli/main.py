"""The groups ``placement`` and ``trace``, and what becomes of the library's errors.

``placement_group`` and ``trace_group`` can be attached to any click group; ``main`` joins them.
"""

from __future__ import annotations

from typing import Any

import click

from moeserve_placement.cli import paging, placement, trace
from moeserve_placement.report.words import printable

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


class LibraryGroup(click.Group):
    """A group whose commands report errors of the library in one line, with exit code 2.

    ValueError is a setting or a file that is not valid, OSError a file that can not be read or
    written, MemoryError and OverflowError a setting or a file too large for this machine. Anything
    else is a bug and keeps its traceback.
    """

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise  # the reader of our output has left: click ends quietly
        except (ValueError, OSError, MemoryError, OverflowError) as error:
            click.echo(f"error: {one_line(error)}", err=True)
            ctx.exit(2)


def one_line(error: Exception) -> str:
    """The text of an error without line breaks; of the system's, "file: reason"."""
    text = str(error)
    if isinstance(error, OSError) and error.strerror:
        text = error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    if isinstance(error, MemoryError | OverflowError):
        text = f"too large for this machine: {text or type(error).__name__}"
    return printable(" ".join(text.split())) or type(error).__name__


@click.group("placement", cls=LibraryGroup, context_settings=CONTEXT)
def placement_group() -> None:
    """Plans, replays and compares expert placements; studies expert caches."""


@click.group("trace", cls=LibraryGroup, context_settings=CONTEXT)
def trace_group() -> None:
    """Shows, makes and converts routing traces."""


@click.group(cls=LibraryGroup, context_settings=CONTEXT)
def main() -> None:
    """Expert placement on a laptop: plan, replay, compare and explain; needs numpy only."""


for _command in (placement.plan, placement.compare, placement.explain, paging.paging):
    placement_group.add_command(_command)
for _command in (trace.info, trace.synth, trace.convert):
    trace_group.add_command(_command)
main.add_command(placement_group)
main.add_command(trace_group)
