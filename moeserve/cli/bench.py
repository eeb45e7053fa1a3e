"""``moeserve bench``: the benchmarks of the repository, found beside the package.

They are no part of an installed wheel (they need the test tools and write models), so the command
works from a checkout, wherever it is called.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import click

import moeserve

_ROOT = Path(moeserve.__file__).resolve().parents[1]
_PASS_ON = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}


@click.group()
def bench() -> None:
    """Runs benchmarks of this machine; needs a checkout of the repository."""


@bench.command(context_settings=_PASS_ON)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def skew(arguments: tuple[str, ...]) -> None:
    """What uneven load of experts costs in serving, and what moving experts wins back.

    Options are those of ``python -m benchmarks.bench_skew``; --help lists them.
    """
    sys.exit(_benchmark("bench_skew").main(arguments))


def _benchmark(name: str) -> Any:
    """The module of that benchmark.

    Raises:
        click.ClickException: there is no checkout here, or a package that it needs is missing.
    """
    if not (_ROOT / "benchmarks" / f"{name}.py").is_file():
        raise click.ClickException(
            f"{_ROOT} has no folder benchmarks: install from a checkout with: pip install -e ."
        )
    if str(_ROOT) not in sys.path:
        sys.path.insert(0, str(_ROOT))
    try:
        return importlib.import_module(f"benchmarks.{name}")
    except ModuleNotFoundError as error:
        raise click.ClickException(
            f"benchmarks need {error.name}: install it with: pip install -e '.[test]'"
        ) from error
