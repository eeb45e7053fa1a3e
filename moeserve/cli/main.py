"""The ``moeserve`` command and its subcommands."""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click

from moeserve import config
from moeserve.cli.bench import bench
from moeserve.cli.options import SectionedCommand, load, setting_options

_CONFIG_FILE = click.option(
    "--config",
    "config_file",
    type=click.Path(path_type=Path),
    help="TOML file with settings by section; the command line overrides it.",
)
_ENABLE_EP = click.option(
    "--enable-expert-parallel",
    is_flag=True,
    expose_value=False,
    help="Accepted for familiarity: ranks are always expert parallel.",
)
_MODEL = click.argument("model", required=False)


class PlacementGroup(click.Group):
    """Adds the groups of the placement library, loaded when one is asked for or all are listed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All names, sorted."""
        return sorted([*super().list_commands(ctx), "placement", "trace"])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of that name."""
        if cmd_name in ("placement", "trace"):
            from moeserve_placement.cli import main as library

            return library.placement_group if cmd_name == "placement" else library.trace_group
        return super().get_command(ctx, cmd_name)


@click.group(
    cls=PlacementGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(version("moeserve"), prog_name="moeserve")
def main() -> None:
    """Serves mixture-of-experts language models. MODEL is a folder, or 'embedded' (the default)."""


main.add_command(bench)


@main.command(cls=SectionedCommand)
@_MODEL
@_CONFIG_FILE
@_ENABLE_EP
@setting_options("model", "parallel", "experts", "cache", "scheduler", "server")
def serve(model: str | None, config_file: Path | None, settings: dict[str, dict[str, Any]]) -> None:
    """Serves MODEL over an OpenAI-compatible HTTP API.

    Under torchrun or the deepspeed launcher this process becomes one rank of the job.
    """
    serve_config = load(config_file, settings, model)
    if place := config.launcher_rank():
        from moeserve.launch import gang

        sys.exit(gang.serve(serve_config, place))
    from moeserve.launch import supervisor

    sys.exit(supervisor.serve(serve_config))


@main.command(cls=SectionedCommand)
@_MODEL
@click.option("--prompt", "-p", multiple=True, help="Text to continue; repeatable. Default: stdin.")
@click.option("--max-tokens", default=64, show_default=True, help="Most tokens to produce.")
@click.option("--temperature", default=0.0, show_default=True, help="0 is greedy.")
@_CONFIG_FILE
@setting_options("model", "parallel", "experts", "cache", "scheduler")
def generate(
    model: str | None,
    prompt: tuple[str, ...],
    max_tokens: int,
    temperature: float,
    config_file: Path | None,
    settings: dict[str, dict[str, Any]],
) -> None:
    """Continues prompts without a server and prints the texts."""
    serve_config = load(config_file, settings, model)
    from moeserve.cli import generate as command

    command.run(
        serve_config,
        list(prompt) or sys.stdin.read().splitlines(),
        max_tokens=max_tokens,
        temperature=temperature,
    )


@main.command(cls=SectionedCommand)
@_MODEL
@click.option("--system", help="System message that starts the conversation.")
@click.option("--max-tokens", default=256, show_default=True, help="Most tokens of an answer.")
@click.option("--temperature", default=0.5, show_default=True, help="0 is greedy.")
@_CONFIG_FILE
@setting_options("model", "parallel", "experts", "cache", "scheduler")
def chat(
    model: str | None,
    system: str | None,
    max_tokens: int,
    temperature: float,
    config_file: Path | None,
    settings: dict[str, dict[str, Any]],
) -> None:
    """Talks with MODEL in the terminal; answers stream in. An empty line or Ctrl-D ends it."""
    serve_config = load(config_file, settings, model)
    from moeserve.cli import chat as command

    command.run(serve_config, system=system, max_tokens=max_tokens, temperature=temperature)
