"""Makes command-line flags from the configuration tree, so that both can not drift apart."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args, get_type_hints

import click

from moeserve import config

_TITLES = {
    "model": "Model",
    "parallel": "Ranks",
    "experts": "Experts",
    "cache": "KV cache",
    "scheduler": "Scheduling",
    "server": "HTTP server",
}


class SectionedCommand(click.Command):
    """A command whose help lists the options by section of the configuration."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes one block an section; options of the command itself come first."""
        blocks: dict[str, list[tuple[str, str]]] = {"": []}
        for param in self.get_params(ctx):
            record = None if isinstance(param, click.Argument) else param.get_help_record(ctx)
            section = param.section if isinstance(param, _SettingOption) else ""
            if record is not None:
                blocks.setdefault(section, []).append(record)
        for section, records in blocks.items():
            with formatter.section(_TITLES.get(section, "Options")):
                formatter.write_dl(records)


class _SettingOption(click.Option):
    """An option that stands for one field of the tree."""

    def __init__(self, *args: Any, section: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.section = section


def setting_options(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator that adds a flag for every field of the named sections.

    The flags' values arrive as one keyword argument, ``settings``: those given on the command
    line, by section.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(**kwargs: Any) -> Any:
            ctx = click.get_current_context()
            settings: dict[str, dict[str, Any]] = {}
            for param in ctx.command.params:
                if isinstance(param, _SettingOption) and param.name is not None:
                    value = kwargs.pop(param.name)
                    given = ctx.get_parameter_source(param.name)
                    if given is not click.core.ParameterSource.DEFAULT:
                        settings.setdefault(param.section, {})[param.name] = value
            return function(settings=settings, **kwargs)

        call.__doc__ = function.__doc__
        call.__name__ = function.__name__
        options = [
            _option(section, field, get_type_hints(config.sections()[section])[field.name])
            for section in names
            for field in dataclasses.fields(config.sections()[section])
            if field.name != "model"  # it is the command's argument
        ]
        call.__click_params__ = [  # type: ignore[attr-defined]
            *reversed(options),
            *getattr(function, "__click_params__", []),
        ]
        return call

    return decorate


def _option(section: str, field: dataclasses.Field[Any], hint: Any) -> _SettingOption:
    flag = "--" + field.name.replace("_", "-")
    kinds = [t for t in get_args(hint) or (hint,) if t is not type(None)]
    help_text = field.metadata["help"]
    if kinds == [bool]:
        names = (f"{flag}/--no-{flag.removeprefix('--')}", field.name)
        return _SettingOption(
            names, section=section, default=field.default, help=help_text, show_default=True
        )
    choices = field.metadata["choices"]
    return _SettingOption(
        (*field.metadata["alias"], flag, field.name),
        section=section,
        type=click.Choice(choices) if choices else kinds[0],
        default=field.default,
        help=help_text,
        show_default=field.default is not None,
    )


def load(
    config_file: Path | None, settings: dict[str, dict[str, Any]], model: str | None = None
) -> config.ServeConfig:
    """The configuration: defaults, then the file, then the command line.

    Raises:
        click.UsageError: any setting is wrong; the text names it.
    """
    try:
        merged = config.load_toml(config_file) if config_file else {}
        for section, values in settings.items():
            merged.setdefault(section, {}).update(values)
        if key := config.api_key_from_env():
            merged.setdefault("server", {}).setdefault("api_key", key)
        if model is not None:
            merged.setdefault("model", {})["model"] = model
        return config.build(merged)
    except config.ConfigError as error:
        raise click.UsageError(str(error)) from error
